"""Planted faults, digests made right: bisect names which of the two is wrong, the block, the node and the position."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import graph_faults
import handmade
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from demo_model import CONFIG, GOLDEN, TOLERANCES
from lora_folders import shared_lora
from onnx import helper, numpy_helper
from polygraphy.json import save_json
from reports import golden, golden_prompt
from safetensors.numpy import load_file, save_file

from lockstep.artifacts.bisect_report import BisectReport, MeasuredOutput
from lockstep.artifacts.files import dump_json, read_json, write_json
from lockstep.artifacts.reports import FAIL, GoldenPrompt, TokenDifference
from lockstep.backends.builder import build
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step import host
from lockstep.targets import Results, Target
from lockstep.verify.bisect import run
from lockstep.verify.bisect.explain import explain_failure, open_graphs
from lockstep.verify.bisect.faults import NODES
from lockstep.verify.bisect.report import text
from lockstep.verify.bisect.request import choose
from lockstep.verify.metrics import failed_path
from lockstep.verify.validate.torch_trace import TorchModel
from lockstep.verify.walk import Tokens
from lockstep.weights import Weights
from some import some

LAYERS = 3
PROMPT = "San Francisco is a city of hills and fog, and of streets that"


@dataclass(frozen=True)
class Copy(Results):
    """The demo's results, with its own graphs and engines to plant faults in."""

    demo: Results = Results()

    def checkpoint(self, model: str) -> Path:
        return self.demo.checkpoint(model)

    def weights(self, model: str, precision: str) -> Path:
        return self.demo.weights(model, precision)


@pytest.fixture
def copied(demo, tmp_path) -> Copy:
    results = Copy(tmp_path, demo)
    for precision in ("fp32", "fp16"):
        shutil.copytree(demo.assembly("demo-llama", precision).parent, results.assembly("demo-llama", precision).parent)
        shutil.copytree(
            demo.engines("demo-llama", precision, "onnxruntime").parent,
            results.engines("demo-llama", precision, "onnxruntime").parent,
        )
    return results


@pytest.fixture(scope="module")
def right(demo) -> Callable[[str], run.TorchRun]:
    """What PyTorch and the export say, which no fault below touches: made once for each precision."""

    @functools.cache
    def run_torch(precision: str) -> run.TorchRun:
        config = read_json(demo.checkpoint("demo-llama"))["config"]
        assembly = demo.assembly("demo-llama", precision)
        graphs = open_graphs(assembly, demo.weights("demo-llama", precision), LAYERS, 1)
        return run.run_torch(config, graphs, Tokenizer.open(assembly).encode(PROMPT))

    return run_torch


def steps(report: BisectReport, part: str) -> MeasuredOutput:
    """How far the logits of all steps are off."""
    return next(row for row in report.rows if row.part == part)


def follow(results: Results, right, precision: str = "fp32") -> BisectReport:
    return run.bisect(
        results, Target("demo-llama", precision, LAYERS, "onnxruntime"), TOLERANCES[precision], prompt=PROMPT,
        torch_run=right(precision),
    )  # fmt: skip


# --- faults: each changes the node that makes `output` ---


def node_of(graph: onnx.GraphProto, output: str) -> onnx.NodeProto:
    return next(node for node in graph.node if output in node.output)


def constant(scale: float, output: str, number: int = 1):
    """Multiply the constant that a node reads by `scale`; the node gets its own constant."""

    def change(graph):
        node = node_of(graph, output)
        array = numpy_helper.to_array(next(tensor for tensor in graph.initializer if tensor.name == node.input[number]))
        graph.initializer.append(numpy_helper.from_array((array * scale).astype(array.dtype), "planted"))
        node.input[number] = "planted"

    return change


def attribute(name: str, value: Any, output: str):
    def change(graph):
        node = node_of(graph, output)
        attributes = [item for item in node.attribute if item.name != name]
        del node.attribute[:]
        node.attribute.extend([*attributes, helper.make_attribute(name, value)])

    return change


def operator(op_type: str, output: str):
    return lambda graph: setattr(node_of(graph, output), "op_type", op_type)


def swapped(output: str):
    def change(graph):
        node = node_of(graph, output)
        node.input[:] = [node.input[1], node.input[0]]

    return change


def put_before(reader: str, number: int, op_type: str, value: np.ndarray):
    """Put an operator with a constant between a node and its input."""

    def change(graph):
        node = node_of(graph, reader)
        graph.initializer.append(numpy_helper.from_array(value, "planted_value"))
        graph.node.insert(
            list(graph.node).index(node),
            helper.make_node(op_type, [node.input[number], "planted_value"], ["planted"], name="planted"),
        )
        node_of(graph, reader).input[number] = "planted"

    return change


def window(graph):
    """Only the last five positions are attended to."""
    graph.initializer.append(numpy_helper.from_array(np.array(5, np.int64), "planted_value"))
    mask = node_of(graph, "where_1").input[0]
    at = list(graph.node).index(node_of(graph, "where_1"))
    graph.node.insert(at, helper.make_node("Less", ["sub_0", "planted_value"], ["planted_near"], name="planted_near"))
    graph.node.insert(at + 1, helper.make_node("And", [mask, "planted_near"], ["planted"], name="planted"))
    node_of(graph, "where_1").input[0] = "planted"


@dataclass(frozen=True)
class Fault:
    """graph: where it is planted. layer, part: what must be named."""

    graph: str
    change: Callable
    layer: int | None
    part: str


FAULTS = {
    "embedding ids": Fault("embedding", put_before("hidden", 1, "Min", np.array(300, np.int64)), None, "embedding"),
    "entry value": Fault("entry", attribute("alpha", 1.02, "value"), 0, "block"),
    "middle gemm": Fault("middle", attribute("alpha", 1.02, "gemm_0"), 0, "block"),
    "middle norm": Fault("middle", put_before("mul_1", 0, "Mul", np.array(1.05, np.float32)), 0, "block"),
    "middle key": Fault("middle", attribute("alpha", 1.02, "key"), 1, "block"),
    "exit eps": Fault("exit", constant(2e5, "add_3"), LAYERS - 1, "exit"),
    "prefill scale": Fault("attention.prefill", constant(1.05, "mul_3"), 0, "attention"),
    "prefill rope": Fault("attention.prefill", constant(1.01, "mul_0"), 0, "attention"),
    "prefill mask": Fault("attention.prefill", swapped("sub_0"), 0, "attention"),
    "prefill window": Fault("attention.prefill", window, 0, "attention"),
    "decode stale row": Fault("attention.decode", operator("LessOrEqual", "less_0"), 0, "attention"),
}
# What ONNX Runtime writes in another way is one graph's and not the other's.
GRAPH_FAULTS = FAULTS | {"middle silu": Fault("middle", operator("Tanh", "sigmoid_0"), 0, "block")}
ENGINE_FAULTS = {
    "embedding ids": FAULTS["embedding ids"],
    "entry value": FAULTS["entry value"],
    "middle silu": Fault("middle", attribute("alpha", 1.702, "mul_2"), 0, "block"),
    "exit eps": Fault("exit", attribute("epsilon", 2.0, "mul_5"), LAYERS - 1, "exit"),
    # attention is one node there
    "prefill mask": Fault("attention.prefill", attribute("causal", 0, "grouped/attention"), 0, "attention"),
    "decode stale row": Fault(
        "attention.decode", put_before("grouped/attention", 5, "Add", np.array(1, np.int32)), 0, "attention"
    ),
}
# One fault of each sort; the others are of the long run.
SHORT_RUN = ("middle silu", "prefill rope", "decode stale row")


def plant_in_graph(results: Results, fault: Fault, precision: str = "fp32") -> None:
    """Change the graph, set its digest right, and build its engine."""
    path = results.assembly("demo-llama", precision)
    assembly = read_json(path)
    kind, _, phase = fault.graph.rpartition(".")
    entry = assembly["kinds"][kind][phase] if kind else assembly["classes"][fault.graph]
    entry["sha256"] = graph_faults.change_file(path.parent / entry["graph"], fault.change)
    write_json(path, assembly)
    build(path, "onnxruntime", results.engines("demo-llama", precision, "onnxruntime"))


def plant_in_engine(results: Results, fault: Fault, precision: str = "fp32") -> None:
    graph_faults.plant_in_engine(results.engines("demo-llama", precision, "onnxruntime"), fault.graph, fault.change)


def check_named(report: BisectReport, wrong: str, fault: Fault) -> None:
    assert len(report.faults) == 1, report.answer
    (first_fault,) = report.faults
    assert (report.wrong, first_fault.wrong, first_fault.decoder_layer) == (wrong, wrong, fault.layer)
    if "or the block before it" in report.answer:
        assert wrong == "graph" and first_fault.graph == "attention.prefill"
        assert fault.part == "block" or fault.graph == "attention.prefill"
    else:
        assert (first_fault.graph, first_fault.part) == (fault.graph, fault.part)
    assert first_fault.error_before < 1e-4 and not first_fault.measured.passed
    assert report.answer in text(report)
    assert BisectReport.from_json(json.loads(dump_json(report.to_json()))) == report


@pytest.mark.parametrize("name", some(GRAPH_FAULTS, *SHORT_RUN))
def test_a_fault_in_a_graph_is_named_by_block(copied, right, name):
    fault = GRAPH_FAULTS[name]
    plant_in_graph(copied, fault)
    report = follow(copied, right)
    check_named(report, "graph", fault)
    assert "export again" in report.look_at[0]


@pytest.mark.parametrize("name", some(ENGINE_FAULTS, "decode stale row"))
def test_a_fault_in_an_engine_is_named_by_block(copied, right, name):
    fault = ENGINE_FAULTS[name]
    plant_in_engine(copied, fault)
    report = follow(copied, right)
    check_named(report, "engine", fault)
    assert "build the engines again" in report.look_at[0]


def chain(path: Path, *operators: str) -> None:
    """Write a graph of one operator after the other."""
    values = [f"value_{number}" for number in range(len(operators) + 1)]
    nodes = [helper.make_node(name, [values[at]], [values[at + 1]]) for at, name in enumerate(operators)]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]) for name in (values[0], values[-1])]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.mark.long
def test_polygraphys_commands_reduce_a_graph_to_the_node_that_is_off(tmp_path: Path) -> None:
    """An engine that computes Cos where the graph has Sin."""
    chain(tmp_path / "right.onnx", "Neg", "Exp", "Sin", "Abs", "Sqrt", "Neg")
    chain(tmp_path / "wrong.onnx", "Neg", "Exp", "Cos", "Abs", "Sqrt", "Neg")
    save_json([{"value_0": np.array([0.1, 0.2, 0.3], np.float32)}], str(tmp_path / "inputs.json"))
    commands = NODES.format(graph="right.onnx", inputs="inputs.json", runner="--onnxrt")
    *before, reduce = commands.split(" && ")
    command = " && ".join([*before, reduce.replace("right.onnx", "wrong.onnx")])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True, env={**os.environ, "PATH": path})
    assert [node.op_type for node in onnx.load(tmp_path / "reduced.onnx").graph.node] == ["Cos"]


# --- weights bound to the wrong slots ---


def rebind(results: Results, layer: int, part: str, slot: str, tensor: str) -> None:
    path = results.assembly("demo-llama", "fp32")
    assembly = read_json(path)
    assembly["layers"][layer][part]["slots"][slot] = [tensor]
    write_json(path, assembly)


@pytest.mark.parametrize(("part", "slot", "tensor"), [
    ("block", "current.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
    ("exit", "model.norm.weight", "model.layers.0.input_layernorm.weight"),
])  # fmt: skip
def test_a_block_with_another_blocks_weights_is_named(copied, right, part, slot, tensor):
    rebind(copied, 2, part, slot, tensor)
    (fault,) = follow(copied, right).faults
    # PyTorch does not show keys before their positions are in them.
    assert (fault.wrong, fault.part, fault.decoder_layer) == ("graph", part.replace("block", "attention"), 2)


# --- reports with less to go by ---


def test_nothing_is_wrong_with_the_demo(copied, right):
    for precision in ("fp32", "fp16"):
        report = follow(copied, right, precision)
        assert report.wrong == "nothing" and not report.faults and steps(report, "runtime").passed
        assert {row.part for row in report.rows} == {"embedding", "block", "attention", "exit", "runtime"}
        assert {row.phase for row in report.rows if row.part == "attention"} == {"prefill", "chunked", "decode"}
        assert "the largest error" in report.answer


@pytest.mark.parametrize("wrong", some(["engine", "graph"]))
def test_faults_are_named_in_fp16(copied, right, wrong):
    scaled = Fault("exit", attribute("alpha", 1.1, "InsertedPrecisionFreeCast_gemm_2"), 2, "exit")
    fault = FAULTS["prefill scale"] if wrong == "graph" else scaled
    (plant_in_graph if wrong == "graph" else plant_in_engine)(copied, fault, "fp16")
    (first_fault,) = follow(copied, right, "fp16").faults
    assert (first_fault.wrong, first_fault.graph) == (wrong, fault.graph)


def test_of_two_faults_the_first_is_the_answer_and_the_other_is_mentioned(copied, right):
    plant_in_graph(copied, FAULTS["exit eps"])
    plant_in_engine(copied, FAULTS["entry value"])
    report = follow(copied, right)
    assert [(fault.wrong, fault.graph) for fault in report.faults] == [("engine", "entry"), ("graph", "exit")]
    assert report.answer.startswith("engine: layer 0") and report.look_at[1].startswith("next, graph: layer 2, exit")


def test_without_engines_the_graphs_are_looked_at(copied, right):
    plant_in_graph(copied, FAULTS["middle gemm"])
    shutil.rmtree(copied.engines("demo-llama", "fp32", "onnxruntime").parent)
    report = follow(copied, right)
    check_named(report, "graph", FAULTS["middle gemm"])
    assert "only the graphs were looked at" in text(report)


# --- which request is followed ---


def golden_report(references: Results, results: Results, prompts: list[GoldenPrompt]) -> Path:
    target = Target("demo-llama", "fp32", 2, "onnxruntime")
    path = failed_path(results.golden(*astuple(target)))
    golden(target, *prompts, result=FAIL, tolerance=1e-3).save(path)
    return path


class Referenced(Copy):
    def reference(self, model: str, layers: int | str) -> Path:
        return self.demo.reference(model, layers)


SHORT = GOLDEN.prompts[1].text
LONG = GOLDEN.prompts[3].text
REJECTED = (TokenDifference(3, 1, 2, 0.5, accepted=False),)


def test_the_prompt_that_failed_is_followed(references, tmp_path):
    results = Referenced(tmp_path, references)
    target = Target("demo-llama", "fp32", 2, "onnxruntime")
    assert choose(results, target, None, 768).text == LONG  # the longest: it sees furthest
    golden_report(
        references,
        results,
        [golden_prompt(LONG, differences=(replace(REJECTED[0], accepted=True),)), golden_prompt(SHORT, passed=False)],
    )
    chosen = choose(results, target, None, 768)
    assert chosen.text == SHORT and len(chosen.tokens.ids) > chosen.tokens.num_prompt == 1


def test_a_failing_prompt_that_the_reference_lacks_is_one_line(references, tmp_path):
    results = Referenced(tmp_path, references)
    path = golden_report(references, results, [golden_prompt("of an older config", passed=False)])
    with pytest.raises(
        InputError,
        match=rf"^{path}: expected a prompt of .*, found 'of an older config'; run the golden check again, or",
    ):
        choose(results, Target("demo-llama", "fp32", 2, "onnxruntime"), None, 768)


def test_weights_that_are_not_the_checkpoints_are_told_by_the_reference(references, tmp_path, right):
    """PyTorch, graphs and engines agree on any weights; the reference was computed on the checkpoint's own."""
    copy_weights(references, tmp_path, lambda weights: weights["model.norm.weight"].__imul__(1.5))
    results = Reweighed(tmp_path, references)
    target = Target("demo-llama", "fp32", 2, "onnxruntime")
    model = TorchModel(
        read_json(references.checkpoint("demo-llama"))["config"], Weights.open(results.weights("demo-llama", "fp32")), 2
    )
    record = model.record(choose(results, target, SHORT, 768).tokens.ids)
    torch_run = run.TorchRun(record, model.noisy(record))
    report = run.bisect(results, target, TOLERANCES["fp32"], prompt=SHORT, torch_run=torch_run)
    assert report.wrong == "weights" and not report.faults and "convert again" in report.look_at[0]


class Reweighed(Referenced):
    weights = Results.weights

    def assembly(self, model: str, precision: str) -> Path:
        return self.demo.assembly(model, precision)

    def engines(self, model: str, precision: str, backend: str) -> Path:
        return self.demo.engines(model, precision, backend)


def copy_weights(demo: Results, folder: Path, change: Callable) -> None:
    source = demo.weights("demo-llama", "fp32")
    out = Results(folder).weights("demo-llama", "fp32")
    manifest = read_json(source)
    (file,) = manifest["files"]
    arrays = dict(load_file(source.parent / file["path"]))
    change(arrays)
    out.parent.mkdir(parents=True)
    save_file(arrays, out.parent / "weights.safetensors")
    data = (out.parent / "weights.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors = {
        name: {**value, "offset": start + header[name]["data_offsets"][0]}
        for name, value in manifest["tensors"].items()
    }
    write_json(
        out,
        {
            **manifest,
            "files": [
                {**file, "path": "weights.safetensors", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            ],
            "tensors": tensors,
        },
    )


# --- by itself, when a check fails ---


def explained(results: Results, right, **options: Any) -> str:
    paths = [
        results.assembly("demo-llama", "fp32"),
        results.weights("demo-llama", "fp32"),
        results.engines("demo-llama", "fp32", "onnxruntime"),
    ]
    request = Tokens(right("fp32").record.token_ids, 4)
    return explain_failure(*paths, LAYERS, TOLERANCES["fp32"], "demo-llama/fp32/3", request, **options)


def test_a_failed_check_is_explained_in_one_line(copied, right):
    assert (
        explained(copied, right) == "each engine alone agrees with its graph on these tokens; "
        "graph against PyTorch: lockstep bisect demo-llama/fp32/3"
    )
    plant_in_engine(copied, FAULTS["entry value"])
    line = explained(copied, right)
    assert line.startswith("engine: layer 0, block entry")
    assert "build the engines again" in line and "\n" not in line


def test_an_explanation_ends_in_time_and_hides_nothing(copied, right):
    assert explained(copied, right, seconds=0.0).startswith(
        "engines agree with their graphs as far as 0 s took (embedding at layer None)"
    )
    copied.engines("demo-llama", "fp32", "onnxruntime").unlink()
    assert explained(copied, right).startswith("bisect cannot run the engines with their graphs: ")


def test_a_fault_of_the_runtime_is_told_from_one_of_graphs_and_engines(copied, right, monkeypatch):
    pack = host.HostExecutor.pack

    def first_token_wrong(self, step, advances):
        rows = pack(self, step, advances)
        step.tokens.token_ids[0] = 7
        return rows

    monkeypatch.setattr(host.HostExecutor, "pack", first_token_wrong)
    report = follow(copied, right)
    assert report.wrong == "runtime" and not report.faults and not steps(report, "runtime").passed
    assert "lockstep.runtime" in explained(copied, right)


# --- the command ---


@pytest.fixture
def tree(references, copied) -> Path:
    """A results folder as the workflow leaves it: all in one place."""
    tree_made = Results(copied.root)
    for path, names in ((Results.checkpoint, ()), (Results.weights, ("fp32",)), (Results.reference, (2,))):
        source, target = (path(results, "demo-llama", *names) for results in (references, tree_made))
        target.parent.mkdir(exist_ok=True)
        for file in source.parent.glob(f"{source.stem}.*"):
            shutil.copy(file, target.parent)
    write_json(tree_made.config(), CONFIG.dump())
    return copied.root


def lockstep(*words: str | Path):
    return CliRunner().invoke(main, list(map(str, words)))


@pytest.mark.parametrize(("target", "break_it", "line"), [
    ("demo-llama/fp32/7", lambda tree: None,
        "target: expected one of demo-llama/fp32/2, .*; found 'demo-llama/fp32/7'"),
    ("demo-llama/fp32/2", lambda tree: tree.config().unlink(), "expected results of a run, found none in .*"),
    ("demo-llama/fp32/2",
        lambda tree: tree.weights("demo-llama", "fp32").unlink(),
        "weights.json: expected the results of demo-llama/fp32/2/onnxruntime, found none; run `lockstep run` first"),
    ("demo-llama/fp32/2",
        lambda tree: tree.reference("demo-llama", 2).unlink(),
        "reference/2.json: expected the reference of .*, found none; run `lockstep run` first, or give --prompt"),
    ("demo-llama/fp32/2",
        lambda tree: tree.assembly("demo-llama", "fp32").with_name("middle.onnx").write_bytes(b"x"),
        "middle.onnx: sha256: expected .*: export again"),
])  # fmt: skip
def test_what_is_missing_is_said_in_one_line(tree, target, break_it, line):
    break_it(Results(tree))
    result = lockstep("bisect", target, "--results", tree)
    assert result.exit_code == (1 if "sha256" in line else 2)
    assert re.fullmatch(rf"lockstep: error: .*{line}.*\n", result.stderr) and not result.stdout


def test_the_command_gives_json_and_changes_nothing(tree):
    plant_in_engine(Results(tree), ENGINE_FAULTS["decode stale row"])
    before = {path: path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()}
    report = json.loads(lockstep("bisect", "demo-llama/fp32/2/onnxruntime", "--results", tree, "--json").stdout)
    assert report["format"] == "lockstep.bisect/3" and report["target"] == "demo-llama/fp32/2/onnxruntime"
    assert report["prompt"] == LONG
    assert report["answer"].startswith(
        "engine: layer 0, attention (attention.decode, decode): attention is off its graph"
    )
    (weights,) = (row for row in report["rows"] if row["part"] in ("runtime", "weights"))
    assert weights["part"] == "weights" and weights["passed"]
    assert {path: path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()} == before


def test_a_prompt_without_tokens_or_too_long_is_one_line(tree):
    assert (
        "expected at least one token"
        in lockstep("bisect", "demo-llama/fp32/2", "--results", tree, "--prompt", "").stderr
    )
    assert (
        "expected at most"
        in lockstep("bisect", "demo-llama/fp32/2", "--results", tree, "--prompt", "fog " * 600).stderr
    )


# --- PyTorch, its weights where they lie ---


MEMORY = """
import sys, threading, time
from pathlib import Path
from lockstep.verify.bisect import run
from lockstep.targets import Results, Target
from lockstep.tolerances import Tolerances

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

before, peak, done = anonymous(), 0, threading.Event()

def sample():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

thread = threading.Thread(target=sample)
thread.start()
target, prompt = Target("tiny", "fp16", "all", "onnxruntime"), "Some text of thirty bytes, say."
report = run.bisect(Results(Path({results!r})), target, {tolerance!r}, prompt=prompt)
done.set()
thread.join()
print(report.wrong, peak - before)
"""


@pytest.mark.long
def test_memory_stays_below_the_weights_and_a_few_layers(tmp_path):
    """Weights are mapped from their files.

    PyTorch, a graph and an engine allocate one layer in float32 besides.
    """
    sizes = {
        "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    }  # fmt: skip
    config = {**handmade.CONFIG, **sizes, "dtype": "float16"}
    results = handmade.make(tmp_path, ["fp16"], config)
    weights = sum(
        file["size"] for file in read_json(results.checkpoint("tiny"))["files"] if file["path"].endswith(".safetensors")
    )
    script = MEMORY.format(results=str(results.root), tolerance=TOLERANCES["fp16"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    wrong, allocated = done.stdout.split()
    layer = 2 * weights / 16  # one of 16 layers, in float32
    # Measured: 4.3 layers: an engine's folded constants and their repacked copy, what malloc keeps. The model in
    # float32 would be 16.
    assert wrong == "nothing" and int(allocated) < 6 * layer < weights


# --- a model that takes adapters ---


@pytest.mark.long
def test_a_model_with_adapters_is_followed_without_them(demo, shared, tmp_path):
    """A fault in a graph with room for adapters is named as in one without, and the answer says what was followed."""
    lora = shared_lora(demo, shared)
    results = Copy(tmp_path, demo)
    for path in (lora.assembly("demo-llama", "fp32"), lora.engines("demo-llama", "fp32", "onnxruntime")):
        shutil.copytree(path.parent, tmp_path / path.parent.relative_to(lora.root))
    target = Target("demo-llama", "fp32", LAYERS, "onnxruntime")
    assembly = results.assembly("demo-llama", "fp32")
    config = read_json(demo.checkpoint("demo-llama"))["config"]
    graphs = open_graphs(assembly, demo.weights("demo-llama", "fp32"), LAYERS, 1)
    torch_run = run.run_torch(config, graphs, Tokenizer.open(assembly).encode(PROMPT))
    bisect = functools.partial(run.bisect, results, target, TOLERANCES["fp32"], prompt=PROMPT, torch_run=torch_run)
    answer = bisect()
    assert answer.wrong == "nothing" and not answer.faults
    assert any("followed without one" in note for note in answer.notes)
    fault = GRAPH_FAULTS["middle residual"]
    plant_in_graph(results, fault)
    check_named(bisect(), "graph", fault)
