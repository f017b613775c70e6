"""Layers with a state: what the runtime does with states, and that the gates see faults in them."""

from __future__ import annotations

import json
from unittest import mock

import families
import numpy as np
import onnx
import pipeline
import pytest
from built_family import NAME, built_family
from families import WITH_STATES
from onnx import numpy_helper
from pipeline import run_golden
from test_sweep import pair, spoiled

import fake_gpu
from faults.between import where
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.graph_files import PHASES
from lockstep.backends.builder import build
from lockstep.errors import CheckError, InputError
from lockstep.export.parity import Small, measure
from lockstep.export.run import assemble
from lockstep.export.tracer import meta_model
from lockstep.runtime import Advance, Engine, Model, ModelOptions, Request, scheduler
from lockstep.step.host_step import HostStep
from lockstep.step.kv_cache import KVCache
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import EXPORT, Tolerances
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms

# The gated delta rule behind a short convolution; a short convolution; Mamba-2 behind one.
FAMILIES = ("qwen3_5_text", *(pytest.param(name, marks=pytest.mark.long) for name in ("lfm2", "bamba")))


@pytest.fixture(scope="module", params=FAMILIES)
def root(request, shared):
    return built_family(shared, request.param)


def open_model(root, precision="fp32", **limits) -> Model:
    options = {"max_batch_size": 4, "max_seq_len": 128, "chunk_size": 32} | limits
    return pipeline.open_model(Results(root / "results"), NAME, precision, **options)


def ids(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 256, count)


def argmax(logits) -> int:
    return int(logits.argmax())


def run(engine: Engine, *requests: Request, abort: int = -1) -> dict[tuple[int, int], list[np.ndarray]]:
    """Return the logits of each choice; a request `abort` ends after three tokens."""
    results: dict[tuple[int, int], list[np.ndarray]] = {}
    engine.add_all(requests)
    for output in engine.steps():
        for token in output:
            results.setdefault((token.request, token.choice), []).append(token.logits)
        if len(results.get((abort, 0), ())) == 3:
            engine.abort(abort)
    return results


def test_choices_and_swapped_and_aborted_requests_have_the_bits_of_each_alone(root, monkeypatch):
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 1)
    prompts = [ids(60, 0), ids(61, 1), ids(9, 2), ids(62, 3)]
    roomy = open_model(root)
    alone = [run(Engine(roomy), Request(prompt, 30, argmax))[0, 0] for prompt in prompts]
    tight = open_model(root, kv_bytes=5 * roomy.tables.pool.page_nbytes)
    engine = Engine(tight, max_num_tokens=40, admission="optimistic")
    requests = [Request(prompt, 30, argmax, n=2 if number == 2 else 1) for number, prompt in enumerate(prompts)]
    actual = run(engine, *requests, abort=1)
    assert engine.scheduler.num_swaps
    for (number, choice), logits in actual.items():
        expected = alone[number][: len(logits)]
        assert len(logits) == (3 if number == 1 else 30), (number, choice)
        np.testing.assert_array_equal(logits, expected, err_msg=f"request {number}, choice {choice}")
    assert tight.tables.pool.num_available == 5


def test_a_seen_prefix_goes_on_from_the_states_behind_it(root):
    """The chunk's end lies within the step that computed it; kept states are evicted when their pages are needed."""
    model = open_model(root, chunk_size=64)
    tables = model.tables
    page = model.tables.pool.page_nbytes
    prompt = ids(120, 0)
    requests = [
        Request(np.concatenate([prompt[:length], ids(100 - length, length)]), 5, argmax) for length in (100, 80, 70)
    ]
    engine = Engine(model)
    first = run(engine, requests[0])[0, 0]
    assert tables.pool.num_cached == 1 + tables.state_pages > 1
    assert tables.state_pages * page >= model.executor.cache.state_nbytes
    answers = run(engine, *requests[1:])
    assert engine.prefix_hits == 2 * 64
    for request, logits in zip(requests, [first, *answers.values()], strict=True):
        alone = run(Engine(model, prefix_caching=False), request)[0, 0]
        np.testing.assert_array_equal(logits, alone)
    tight = open_model(root, max_batch_size=1, chunk_size=64, kv_bytes=(3 + tables.state_pages) * page)
    run(engine := Engine(tight), *requests, Request(ids(100, 9), 5, argmax))
    engine.scheduler.check()
    assert len(tight.executor.stored_pages) == 2  # of one chunk, its tokens and its states


@pytest.mark.long
@pytest.mark.parametrize("family", WITH_STATES)
def test_in_fp16_a_request_has_the_bits_of_it_alone_in_company(shared, family):
    """Buffers of a step are told apart by type: what a recurrence takes is float32, attention has float16."""
    model = open_model(built_family(shared, family, "fp16"), "fp16")
    requests = [Request(ids(length, length), 5, argmax) for length in (70, 9)]
    actual = run(Engine(model, max_num_tokens=40), *requests)
    for number, request in enumerate(requests):
        np.testing.assert_array_equal(actual[number, 0], run(Engine(model), request)[0, 0])


def check_golden(root, folder) -> None:
    results = Results(root / "results")
    target = Target(NAME, "fp32", "all", "onnxruntime")
    reference = results.reference(NAME, "all")
    if not reference.exists():
        terms = GoldenTerms(8, ("San Francisco is a", "x", "lockstep"), 120)
        make_reference(results.checkpoint(NAME), "all", terms, reference)
    limits = Limits(max_batch_size=3, max_input_len=32, max_seq_len=128, max_num_tokens=64)
    run_golden(results, target, Tolerances("fp32"), limits, folder)


def test_golden_passes_to_the_last_position(root, tmp_path):
    """The check whose failures below are of a fault."""
    check_golden(root, tmp_path)


def forgotten(right):
    def call(self, mixer, phase, tokens, values, state, output):
        return right(self, mixer, phase, tokens, values, np.zeros_like(state) if phase == "prefill" else state, output)

    return call


def of_the_neighbour(right):
    return lambda self, layer, capacity, low, high: right(
        self, layer, capacity, max(low - 1, 0), max(low - 1, 0) + high - low
    )


def not_written(right):
    return lambda self, part, state, new: None


@pytest.mark.parametrize(
    ("owner", "name", "wrap"),
    [
        pytest.param(HostStep, "_add_state_call", forgotten, id="forgotten between chunks"),
        pytest.param(KVCache, "state", of_the_neighbour, id="of the request in the row before"),
        pytest.param(HostStep, "_write_states", not_written, id="of decoded tokens not kept"),
    ],
)
def test_the_golden_check_sees_a_state_that_is(root, tmp_path, owner, name, wrap):
    with mock.patch.object(owner, name, wrap(getattr(owner, name))), pytest.raises(CheckError):
        check_golden(root, tmp_path)


@pytest.mark.parametrize("output", ["attention", "state_out"])
def test_compare_sees_a_state_engine_that_is_off_at_one_size(root, tmp_path, output):
    results = Results(root / "results")
    limits = Limits(max_batch_size=3, max_seq_len=128, max_num_tokens=64)
    for mixer in Assembly.load(results.assembly(NAME, "fp32")).state_mixers:
        name = f"{mixer}.prefill"
        right = pair(results, results.engines(NAME, "fp32", "onnxruntime"), name, NAME, limits)
        entry = right.compare(Tolerances("fp32", "onnxruntime"), 300)
        assert entry.passed and entry.sizes.tried == entry.sizes.known >= 64
        edit = where(output, value=37)
        wrong = pair(results, spoiled(results, tmp_path / name, name, edit, NAME), name, NAME, limits)
        assert not wrong.compare(Tolerances("fp32", "onnxruntime"), 300).passed and "num_tokens 37" in wrong.failures[0]


def small_of(root) -> Small:
    path = Results(root / "results").assembly(NAME, "fp32")
    assembly = Assembly.load(path)
    files = {graph.file: (path.parent / graph.file).read_bytes() for _, graph in assembly.graphs()}
    return Small(json.loads((root / "shape.json").read_text()), files, assembly)


def shifted(model: onnx.ModelProto) -> None:
    """Let a chunk's state end a token early: of its last rows the ones before."""
    last = next(node for node in model.graph.node if "state_out" in node.output).input[0]
    cut = next(node for node in model.graph.node if last in node.output)
    names = {}
    for place, change in ((1, -1), (2, None)):
        value = next(tensor for tensor in model.graph.initializer if tensor.name == cut.input[place])
        start = numpy_helper.to_array(value)
        names[place] = f"{value.name}_shifted"
        array = start + change if change else np.array([-1], np.int64)
        model.graph.initializer.append(numpy_helper.from_array(array, names[place]))
    for place, new in names.items():
        cut.input[place] = new


def test_the_export_refuses_a_state_that_ends_a_token_early(root):
    small = small_of(root)
    assert measure(small).error < EXPORT
    file = small.assembly.state_mixers["window"].prefill.file
    model = onnx.ModelProto.FromString(small.files[file])
    shifted(model)
    assert measure(Small(small.config, {**small.files, file: model.SerializeToString()}, small.assembly)).error > 0.1


def slower(model: onnx.ModelProto) -> None:
    """Let a state decay by one per cent more."""
    for node in model.graph.node:
        node.input[:] = ["decay_off" if name == "decay" else name for name in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1.01), "more"))
    model.graph.node.insert(0, onnx.helper.make_node("Mul", ["decay", "more"], ["decay_off"]))


@pytest.mark.parametrize("phase", PHASES)
def test_the_export_refuses_a_decay_that_is_off_by_one_per_cent(root, phase):
    small = small_of(root)
    mixer = next((mixer for mixer in small.assembly.state_mixers.values() if "decay" in mixer.inputs), None)
    if mixer is None:
        pytest.skip("its states do not decay")
    file = mixer.phases()[phase].file
    model = onnx.ModelProto.FromString(small.files[file])
    slower(model)
    assert measure(Small(small.config, {**small.files, file: model.SerializeToString()}, small.assembly)).error > 1e-3


def test_several_ranks_are_refused_by_name(root):
    small = small_of(root)
    with pytest.raises(InputError, match="tensor_parallel: expected layers of attention, found layers with a state"):
        assemble(meta_model(small.config, "fp32"), small.config, "fp32", tensor_parallel=2)


LIMITS = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128}


@pytest.mark.parametrize(
    ("family", "precision", "tolerance"),
    [
        ("qwen3_5_text", "fp32", 1e-4),  # with traced attention
        pytest.param("lfm2", "fp16", 2e-2, marks=pytest.mark.long),
    ],
)
def test_states_lie_beside_blocks_of_tensorrt(shared, tmp_path, family, precision, tolerance):
    """In the types that the blocks have: a prompt in chunks, then rows that decode, against ONNX Runtime."""
    results = Results(built_family(shared, family, precision) / "results")
    assembly = results.assembly("tiny", precision)
    weights = results.weights("tiny", precision)
    tokens = np.random.default_rng(0).integers(3, 256, 60)
    steps = [
        [(0, 0, 40)],
        [(0, 40, 50), (2, 0, 9)],
        *([(0, at, at + 1), (2, at - 41, at - 40)] for at in range(50, 54)),
    ]

    def logits(model):
        rows = []
        for step in steps:
            rows += [model.step([Advance(slot, tokens[low:high], low) for slot, low, high in step])]
        return np.concatenate(rows)

    on_host = build(assembly, "onnxruntime", tmp_path / "onnxruntime" / "engines.json")
    expected = logits(Model.open(on_host, assembly, weights, options=ModelOptions(max_seq_len=128)))
    with fake_gpu.installed("10.6.0") as gpu:
        model = Model.open(build(assembly, "tensorrt", tmp_path / "engines.json", LIMITS), assembly, weights)
        actual = logits(model)
        del model
        assert not gpu.faults
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.long
def test_the_hidden_state_of_layers_with_two_mixers_is_the_residual_stream():
    """Granite 4 H scales its embedding before the first layer, and that is still the stream."""
    config = {
        **families.FAMILIES["bamba"].config, "model_type": "granitemoehybrid", "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1, "mamba_expand": 2, "embedding_multiplier": 12.0,
    }  # fmt: skip
    _, assembly = assemble(meta_model(config, "fp32"), config, "fp32")
    for name, graph in assembly.classes.items():
        for io in [io for io in graph.signature.outputs if io.name == "hidden_out"]:
            assert io.shape[1:] == (config["hidden_size"],), name
