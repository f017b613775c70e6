"""A choice that rounding decides is no error, and another choice is: engines of bf16, right and with wrong routers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from built_family import NAME, built_family
from onnx import TensorProto, helper

from faults.edit import Edit
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.builder import build
from lockstep.errors import CheckError
from lockstep.onnx_tools.rounded import UNITS, exact_and_rounded
from lockstep.onnx_tools.sessions import compute
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.compare.noisy_run import is_clear
from lockstep.verify.golden.check import GoldenCheck, check_engines
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.graphs import Graphs
from lockstep.verify.routing.block import ChoosingBlock, Routed
from lockstep.verify.routing.choices import Choice, with_choices
from lockstep.verify.validate.torch_choices import TorchChoices
from lockstep.verify.walk import Tokens, Walk
from lockstep.weights import Weights
from some import some

pytestmark = pytest.mark.exports

MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "dots1", "deepseek_v3", "gpt_oss", "nemotron_h", "llama4_text",
)  # fmt: skip
LIMITS = Limits(4, 64, 128, 256)
TERMS = GoldenTerms(8, ("San Francisco is a", "1 2 3 4"), 70)


# --- engines of bf16 on every CPU: their float32 results are rounded ---


def next_expert(edit: Edit) -> None:
    """Each token takes the expert after its own."""
    readers = [(gather, 1) for gather in edit.nodes("GatherND") if "experts" in gather.input[0]]
    readers = readers or [(scatter, 1) for scatter in edit.nodes("ScatterElements")]  # Llama 4 computes all experts
    experts = next(value for value in edit.graph.input if "experts.down_proj" in value.name)
    count = edit.const(experts.type.tensor_type.shape.dim[0].dim_value)
    for node, place in readers:
        node.input[place] = edit.op("Mod", edit.op("Add", node.input[place], edit.const(1)), count)


def shares_scaled(edit: Edit) -> None:
    """What the experts give counts 1.05 times as much."""
    edit.replace(edit.slot("experts.down_proj"), lambda weights: edit.times(weights, 1.05))


def without_bias(edit: Edit) -> None:
    """The router's bias is left out."""
    edit.replace(edit.slot("bias"), lambda bias: edit.times(bias, 0.0))


Fault = Callable[[Edit], None]


def bf16_engines(root: Path, results: Results, backend: str, fault: Fault | None) -> Path:
    """Build engines that round to bf16 what products give, with a fault in each block that chooses."""
    assembly = results.assembly(NAME, "fp32")
    engines = root / "engines" / "engines.json"
    planted = root / "graphs" / assembly.name
    shutil.copytree(assembly.parent, planted.parent)
    content = read_json(planted)
    entries = [*content["classes"].values()]
    for variant in content["kinds"].values():
        entries += [variant["prefill"], variant["decode"]]
    for entry in entries:
        path = planted.parent / entry["graph"]
        model = onnx.load(path)
        if fault is not None and with_choices(model)[1]:
            edit = Edit(model)
            fault(edit)
            model = onnx.ModelProto.FromString(edit.done())
        _, rounded = exact_and_rounded(model, [slot["name"] for slot in entry.get("slots", ())])
        onnx.save(rounded, path)
        entry["sha256"] = sha256_file(path)
    write_json(planted, content)
    options = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    build(planted, backend, engines, options if backend == "tensorrt" else {})
    manifest = read_json(engines)
    right = read_json(results.engines(NAME, "fp32", "onnxruntime"))
    for name, entry in manifest["engines"].items():
        if name in right["engines"]:  # a GPU has states besides
            entry["graph_sha256"] = right["engines"][name]["graph_sha256"]
    write_json(engines, manifest)
    return engines


@pytest.fixture
def planted(shared, tmp_path):
    """Return what `GoldenCheck` takes of such engines."""

    def make(family: str, fault: Fault | None = None, backend: str = "onnxruntime") -> tuple:
        results = Results(built_family(shared, family) / "results")
        reference = tmp_path / "reference" / "all.json"
        make_reference(results.checkpoint(NAME), "all", TERMS, reference)
        engines = bf16_engines(tmp_path, results, backend, fault)
        target = Target(NAME, "fp32", "all", backend)
        files = results.assembly(NAME, "fp32"), results.weights(NAME, "fp32"), engines, reference
        return *files, target, Tolerances("bf16", backend), LIMITS

    return make


@pytest.fixture
def check(planted, tmp_path):
    """Run the golden check of such engines; the report."""

    def run(*case: Any) -> dict:
        return read_json(check_engines(*planted(*case), tmp_path / "golden.json", tmp_path / "speed.json"))

    return run


@pytest.mark.parametrize("family", some(MIXTURES, "mixtral"))
def test_right_engines_of_mixtures_pass_in_bf16(check, family):
    assert check(family)["result"] == "pass"


@pytest.mark.long
@pytest.mark.parametrize("family", MIXTURES)
def test_right_engines_of_mixtures_pass_in_bf16_on_a_gpu(check, gpu, family):
    assert check(family, None, "tensorrt")["result"] == "pass"


# Of these two models 1.05 times what experts give is less than bf16 rounds.
SMALL_EXPERTS = ("nemotron_h", "llama4_text")


@pytest.mark.parametrize(
    ("family", "fault"),
    some([
        *((family, next_expert) for family in MIXTURES),
        *((family, shares_scaled) for family in MIXTURES if family not in SMALL_EXPERTS),
        *((family, without_bias) for family in ("deepseek_v3", "dots1")),
    ], ("nemotron_h", next_expert)),  # by day; mixtral's on a GPU
)  # fmt: skip
def test_routers_that_are_wrong_are_refused(check, family, fault):
    """Nemotron-H's is in its last block; its layers have other numbers than their mixers."""
    with pytest.raises(CheckError, match="along the engine's own choices"):
        check(family, fault)


def test_choices_of_engines_on_a_gpu_are_followed_and_change_no_bits(planted, gpu):
    golden = GoldenCheck(*planted("mixtral", None, "tensorrt"), (), None)
    golden.judge_choices()
    alone, _ = golden.decode([golden.teacher_forced(prompt) for prompt in golden.prompts])
    assert golden.follow_choices()
    observed, _ = golden.decode([golden.teacher_forced(prompt) for prompt in golden.prompts])
    for prompt, first, other in zip(golden.prompts, observed, alone, strict=True):
        assert np.array_equal(first.logits, other.logits)
        golden.logit_error(prompt, "along the reference's tokens", first)
    golden.mixed(alone)
    assert not golden.failures and golden.routes.report().tied > 0


@pytest.mark.parametrize(
    ("family", "fault"),
    some([("mixtral", next_expert), ("mixtral", shares_scaled), ("deepseek_v3", without_bias)]),
)  # fmt: skip
def test_routers_that_are_wrong_are_refused_on_a_gpu(check, gpu, family, fault):
    with pytest.raises(CheckError, match="along the engine's own choices"):
        check(family, fault, "tensorrt")


# --- what may be chosen ---


def chosen(choice: Choice, scores: list[float], tolerance: float) -> list[list[int]]:
    tolerances = np.full(len(scores), tolerance)
    return [np.flatnonzero(way).tolist() for way in choice.alternatives(np.array(scores), tolerances)]


def test_scores_that_are_nearer_than_rounding_may_change_places_and_others_not():
    two = Choice("of four", 2, 4)
    assert chosen(two, [0.4, 0.3, 0.29, 0.1], 0.005) == [[0, 1]]
    assert chosen(two, [0.4, 0.3, 0.29, 0.1], 0.02) == [[0, 1], [0, 2]]
    assert chosen(two, [0.3, 0.3, 0.3, 0.1], 0.02) == [[0, 1], [1, 2], [0, 2]]
    assert chosen(Choice("above a limit", 0, 3), [0.5, -0.01, -0.5], 0.02) == [[0], [0, 1]]
    assert chosen(Choice("the smallest", 1, 3, largest=False), [0.1, 0.2, 0.3], 0.02) == [[0]]


def test_rows_whose_choice_is_by_less_than_the_bound_are_told():
    scores = np.array([[0.5, 0.25, 0.2], [0.5, 0.25, 0.246], [0.3, 0.3, 0.3], [0.4, np.nan, 0.1]], np.float32)
    assert is_clear(Choice("two", 2, 3), scores, np.full(4, 0.01)).tolist() == [True, False, False, True]
    rows_of_scores = np.array([[0.5, -0.01, -0.5], [0.5, -0.002, 0.1], [-np.inf, 0.3, 0.001]], np.float32)
    assert is_clear(Choice("above a limit", 0, 3), rows_of_scores, np.full(3, 0.01)).tolist() == [True, False, False]


def test_pytorchs_choice_is_taken_where_rounding_may_decide_and_no_other(shared):
    results = Results(built_family(shared, "mixtral") / "results")
    assembly = results.assembly(NAME, "fp32")
    graphs = Graphs(assembly, Assembly.load(assembly), Weights.open(results.weights(NAME, "fp32")), "all", 1)
    blocks = {name: ChoosingBlock(graph, 1) for name, graph in graphs.classes.items()}
    walk = Walk(graphs, [Tokens(np.arange(40), 40)])
    run = next(run for run in walk if run.stage.part == "block" and blocks[run.stage.graph].choices)
    stage = run.stage
    block = blocks[stage.graph]
    weights = graphs.weights_of(stage.graph, stage.slots)
    routed = block.follow(stage.inputs, weights, run.outputs, 1.0)
    others = {name: np.roll(chosen, 1, axis=1) for name, chosen in routed.chosen.items()}
    of_others = block.forced(stage.inputs, weights, block.forces(others, np.arange(40), 40))
    size = np.abs(of_others["hidden_out"]).max()
    assert np.abs(of_others["hidden_out"] - run.outputs["hidden_out"]).max() > 1e-2 * size
    for noise, expected in ((1e6, of_others), (1e-6, run.outputs)):
        choices = TorchChoices(graphs, blocks, Tolerances("fp16", noise=noise))
        outputs = choices(stage, run.outputs, {"hidden_out": of_others["hidden_out"]})
        for name, array in expected.items():
            np.testing.assert_allclose(outputs[name], array, atol=1e-5 * np.abs(array).max())
        assert choices.before_ties([15, 25]) == [15, 25]
    nearest = int(np.argmin(routed.margins))
    noise = 8 * routed.margins[nearest] * UNITS / Tolerances("fp16").rounding  # so that rounding may decide few of them
    choices = TorchChoices(graphs, blocks, Tolerances("fp16", noise=noise))
    choices(stage, run.outputs, {"hidden_out": run.outputs["hidden_out"]})
    assert choices.before_ties([nearest, 40 - nearest]) == [nearest, 0]


def test_the_reference_may_route_otherwise_what_rounding_of_all_earlier_blocks_decides():
    routed = Routed({}, {}, {}, np.array([False, False, True]), np.array([1.3, 3, 3]))
    assert routed.may_differ(1).tolist() == [False, False, True]
    assert routed.may_differ(4).tolist() == [True, False, True]


def test_a_choice_can_be_forced_and_its_values_stay_the_scores():
    graph = helper.make_graph(
        [
            helper.make_node("TopK", ["x", "two"], ["values", "places"], axis=-1),
            helper.make_node("Cast", ["places"], ["chosen"], to=TensorProto.FLOAT),
        ],
        "router",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["num_tokens", 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["num_tokens", 2]) for name in ("values", "chosen")],
        [onnx.numpy_helper.from_array(np.array([2]), "two")],
    )
    model, (choice,) = with_choices(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), forced=True
    )
    x = np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)
    force = choice.force(np.array([[False, False, True, True]]))
    free = compute(model, {"x": x, choice.forced: np.zeros_like(x)})
    forced = compute(model, {"x": x, choice.forced: force})
    assert free["chosen"].tolist() == [[0, 1]] and sorted(forced["chosen"][0].tolist()) == [2, 3]
    assert sorted(forced["values"][0].tolist()) == sorted(x[0, 2:].tolist())
    assert np.array_equal(forced[choice.scores], x)
