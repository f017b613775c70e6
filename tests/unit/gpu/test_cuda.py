"""The CUDA backend on the fake GPU: kernels compiled for the host, cuBLAS and products of small weights in NumPy."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import onnx
import pytest
from built_family import build_family, built_family
from demo_model import CONFIG, LIMITS
from families import FAMILIES
from quantized_models import FAMILY_ASKED, LIMIT, demo, random_family, refer

import fake_gpu
import lockstep_gpu.compute_capability as driver
from lockstep import make_random_checkpoint
from lockstep.artifacts.dtypes import named_dtype
from lockstep.artifacts.files import read_json, write_bytes
from lockstep.artifacts.signature import IO
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.errors import CheckError, InputError
from lockstep.export.quantize import quantize
from lockstep.export.run import export
from lockstep.onnx_tools.cut_products import CutGraph, cut_products
from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.sessions import compute
from lockstep.runtime import Advance, Engine, Model, ModelOptions, Request
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify import compare
from lockstep.verify.golden.check import check_engines
from lockstep.weights import convert
from lockstep_gpu import libraries
from lockstep_gpu.backends.cuda import compiler
from lockstep_gpu.backends.cuda.backend import CudaBackend
from lockstep_gpu.backends.cuda.kernels_file import KernelsFile
from some import some

SIZES = ("max_batch_size", "max_num_tokens", "max_seq_len")
TOLERANCE = CONFIG.tolerance("demo-llama", "w8a16", "cuda")


@pytest.fixture
def gpu() -> Iterator[fake_gpu.Gpu]:
    with fake_gpu.installed(name="cuda") as gpu:
        yield gpu
    assert not gpu.faults


def built(results: Results, precision: str, folder: Path, limits: Limits = LIMITS, model: str = "model"):
    options = {name: getattr(limits, name) for name in SIZES}
    return build(results.assembly(model, precision), "cuda", folder / "engines" / "engines.json", options)


def checked(
    results: Results, precision: str, layers: int | str, engines: Path, limits: Limits, out: Path, allowed=TOLERANCE
):
    check_engines(
        results.assembly("model", precision), results.weights("model", precision), engines,
        results.quantized_reference("model", precision, layers), Target("model", precision, layers, "cuda"), allowed,
        limits, out / "golden.json", out / "speed.json",
    )  # fmt: skip
    return read_json(out / "golden.json")


@pytest.mark.long
@pytest.mark.parametrize("precision, layers", [("w8a16", 2), ("w4a16", 2), ("w4a16", "all"), ("w8a8-fp8", 2)])
def test_the_demo_says_what_its_dequantised_weights_say(shared, gpu, tmp_path, precision, layers):
    results = demo(shared, precision)
    engines = built(results, precision, tmp_path)
    assert checked(results, precision, layers, engines, LIMITS, tmp_path)["result"] == "pass"
    pair = results.assembly("model", precision), results.weights("model", precision)
    allowed = CONFIG.tolerance("demo-llama", precision, "cuda")
    out = compare.run(*pair, engines, allowed, LIMITS, tmp_path / "compare.json", seconds=8)
    report = read_json(out)
    assert set(report["engines"]) == {"embedding", "entry", "middle", "exit"}
    # Also at the end of float16, which its activations are, not of float32 as in the graph.
    assert all(engine["sizes"]["tried"] for engine in report["engines"].values())
    assert 0 < report["relative_error"] <= report["tolerance"]


@pytest.mark.long
def test_e4m3_needs_a_gpu_that_has_it(shared, gpu, tmp_path, monkeypatch):
    results = demo(shared, "w8a8-fp8")
    pair = results.assembly("model", "w8a8-fp8"), results.weights("model", "w8a8-fp8")
    engines = built(results, "w8a8-fp8", tmp_path)
    monkeypatch.setattr("lockstep_gpu.cuda.compute_capability", lambda number=0: (8, 0))
    with pytest.raises(InputError, match=r"expected a GPU of compute capability 8.9 or higher for w8a8-fp8, found 8.0"):
        Model.open(engines, *pair, 2)


@pytest.mark.long
def test_the_warm_up_loads_products_of_every_size(shared, gpu, tmp_path):
    """cuBLAS loads a kernel with its first call, and chooses it by the number of rows."""
    results = demo(shared, "w8a16")
    engines = built(results, "w8a16", tmp_path)
    model = Model.open(engines, results.assembly("model", "w8a16"), results.weights("model", "w8a16"), 2)
    model.warm_up()
    largest = model.max_num_tokens + model.max_batch_size
    for first in range(33, largest - 31):
        assert gpu.product_rows & set(range(first, first + 32))


def test_requests_are_served_as_ever(shared, gpu, tmp_path):
    """The scheduler over a cut engine: requests that come and go, prompts in pieces, answers as of each alone."""
    results = demo(shared, "w4a16")
    paths = results.assembly("model", "w4a16"), results.weights("model", "w4a16")
    engines = built(results, "w4a16", tmp_path)
    random = np.random.default_rng(0)
    model = Model.open(engines, *paths, 2, ModelOptions(**{name: getattr(LIMITS, name) for name in SIZES}))
    prompts = [random.integers(0, 768, size).tolist() for size in (3, 70, 1)]

    def answers(requests: list[Request]) -> dict[int, list[int]]:
        results: dict[int, list[int]] = {}
        for token in Engine(model).run(requests):
            results.setdefault(token.request, []).append(token.token)
        return results

    together = answers([Request(prompt, 4) for prompt in prompts])
    assert list(map(len, together.values())) == [4] * 3
    assert [together[number] for number in range(3)] == [answers([Request(prompt, 4)])[0] for prompt in prompts]
    for _ in itertools.islice(model.warm_up_parts(), 2):  # a server has requests in between
        assert answers([Request(prompts[1], 4)])[0] == together[1]
    assert answers([Request(prompt, 4) for prompt in prompts]) == together


@pytest.mark.parametrize(
    "family, precision",
    [pytest.param(*item, marks=pytest.mark.long) for item in (("gemma2", "w8a16"), ("glm", "w4a16"))],
)
def test_families_with_tied_heads_soft_caps_biases_and_partial_rope(shared, gpu, tmp_path, family, precision):
    results = random_family(shared, family, precision)
    engines = built(results, precision, tmp_path, LIMIT)
    assert checked(results, precision, 2, engines, LIMIT, tmp_path)["result"] == "pass"


def middle(shared) -> onnx.ModelProto:
    return onnx.load(demo(shared, "w8a16").assembly("model", "w8a16").with_name("middle.onnx"))


def test_a_llama_block_is_three_pieces_and_four_steps_of_products(shared):
    cut = cut_products(middle(shared))
    kinds = [step if isinstance(step, int) else len(step) for step in cut.steps]
    assert (len(cut.pieces), kinds) == (3, [1, 0, 2, 1, 1, 2, 3])


def test_a_block_that_computes_something_else_is_refused(shared, monkeypatch):
    """Gate and up exchanged."""

    def wrong(model: onnx.ModelProto) -> CutGraph:
        cut = cut_products(model)
        (at,) = (number for number, step in enumerate(cut.steps) if not isinstance(step, int) and len(step) == 2)
        gate, up = cut.steps[at]
        swapped = replace(gate, slots=up.slots), replace(up, slots=gate.slots)
        return CutGraph(cut.pieces, (*cut.steps[:at], swapped, *cut.steps[at + 1 :]), cut.inner)

    monkeypatch.setattr(compiler, "cut_products", wrong)
    with pytest.raises(CheckError, match="graph middle: output hidden_out: expected .* compute something else"):
        compiler.compile_block(middle(shared))


@pytest.mark.parametrize("damage, actual", [
    (lambda data: data[:-9], "expected JSON, found Expecting"),
    (lambda data: data.replace(b"lockstep.kernels/1", b"lockstep.kernels/9"), "expected format .*kernels/1'"),
    (lambda data: data.replace(b'"in_features"', b'"features"'),
        r"steps\[\d\]\.products\[0\]: expected an object with in_features, found "),
])  # fmt: skip
def test_a_damaged_engine_file_is_named(shared, tmp_path, damage, actual):
    engines = built(demo(shared, "w8a16"), "w8a16", tmp_path)
    file = engines.parent / "middle.kernels"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckError, match=rf"middle.kernels: {actual}.*; build it again$"):
        KernelsFile.load(file)


def test_a_build_needs_no_gpu_and_no_library_of_one(shared, tmp_path):
    """The same bytes in a process in which neither can be imported."""
    engines = built(demo(shared, "w8a16"), "w8a16", tmp_path)
    assembly = demo(shared, "w8a16").assembly("model", "w8a16")
    options = {name: getattr(LIMITS, name) for name in SIZES}
    code = "import sys; sys.modules['cuda'] = sys.modules['cudnn'] = sys.modules['tensorrt'] = None\n"
    code += f"from lockstep.backends.builder import build; build({str(assembly)!r}, 'cuda', sys.argv[1], {options})"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again" / "engines.json")], check=True)
    names = {path.name for path in engines.parent.iterdir()}
    assert {"embedding.kernels", "middle.kernels", "exit.kernels"} < names
    assert all((tmp_path / "again" / name).read_bytes() == (engines.parent / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    "capability, installed, actual",
    [
        (None, True, "needs an NVIDIA GPU of compute capability 8.0 or higher, found none; its"),
        ("7.5", True, "needs an NVIDIA GPU of compute capability 8.0 or higher, found one of 7.5; its"),
        ("9.0", False, "needs cuda-bindings, nvidia-cudnn-frontend, nvmath-python in this Python, found none: pip"),
    ],
)
def test_where_engines_cannot_run_is_said_before_they_are_opened(monkeypatch, tmp_path, capability, installed, actual):
    monkeypatch.setattr(driver, "ask_driver", lambda: capability)
    monkeypatch.setattr("lockstep_gpu.backends.cuda.gpu.is_installed", lambda module: installed)
    with pytest.raises(InputError, match=f"backend cuda: {actual}"):
        CudaBackend().load(tmp_path / "middle.kernels", (), None, False)


@pytest.mark.long
def test_what_has_no_kernel_is_named_with_the_backend_that_has_it(shared):
    model = middle(shared)
    for node in model.graph.node:
        node.op_type = "HardSwish" if node.op_type == "Sigmoid" else node.op_type
    with pytest.raises(CheckError, match="graph middle.*: expected .*, found HardSwish; use the backend tensorrt"):
        compiler.compile_block(model)
    files, assembly = quantize(*shared.assembled(dict(FAMILIES["mixtral"].config), "fp32"), "w8a16", 16)
    model = onnx.load_model_from_string(files[assembly.classes["middle"].file])
    with pytest.raises(
        CheckError, match="graph middle: expected experts in groups of a multiple of 32 .*, found .* 16"
    ):
        compiler.compile_block(model)


class Arrays(UserDict):
    """Weights by slot, as `weights.Tensors` has them."""

    checkpoint = property(lambda self: type(self))

    def identity(self, name: str) -> int:
        return id(self.data[name])

    def location(self, name: str) -> None:
        return None


@pytest.mark.parametrize(
    "family, graph",
    some([("mixtral", "middle"), ("dots1", "middle_2"), ("gpt_oss", "exit"), ("llama4_text", "exit_2")]),
)
def test_rows_of_experts_have_the_bits_that_they_have_alone(shared, gpu, tmp_path, family, graph):
    """Against the graph in ONNX Runtime, whose rows may have other experts where two scores are nearly equal."""
    files, assembly = shared.assembled(dict(FAMILIES[family].config), "fp16")
    engine_class = assembly.classes[graph]
    model = onnx.load_model_from_string(files[engine_class.file])
    path = tmp_path / "block.kernels"
    feeds = random_inputs(model)
    random = np.random.default_rng(0)
    write_bytes(path, compiler.compile_block(model).to_bytes())
    weights = {slot.name: feeds[slot.name] for slot in engine_class.signature.slots}
    inputs = [io for io in engine_class.signature.inputs if io.name not in weights]
    rows = {io.name: random.standard_normal((70, *feeds[io.name].shape[1:])).astype(io.dtype) for io in inputs}

    def feeds_of(low: int, high: int) -> dict[str, np.ndarray]:
        return {name: np.arange(high - low) if name == "logit_rows" else rows[name][low:high] for name in rows}

    from lockstep_gpu.backends.cuda.program import KernelsProgram  # which is bound to the fake GPU

    slots = [IO(name, array.dtype.name, array.shape) for name, array in weights.items()]
    engine = KernelsProgram(path, slots).bind(Arrays(weights), {name: [name] for name in weights})

    def run(low: int, high: int) -> dict[str, np.ndarray]:
        likes = {io.name: np.empty((high - low, *io.sizes[1:]), np.float16) for io in engine_class.signature.outputs}
        return engine.run_once(feeds_of(low, high), likes)

    together = run(0, 70)
    for low, high in ((0, 1), (69, 70), (20, 33)):
        for name, values in run(low, high).items():
            np.testing.assert_array_equal(values, together[name][low:high], err_msg=name)
    for name, values in compute(model, {**feeds_of(0, 70), **weights}).items():
        error = np.abs(together[name] - values.astype(np.float32)).max(axis=1) / np.abs(values).max()
        assert np.mean(error <= 1e-2) >= 0.95, name  # as `compiler` allows


@pytest.mark.long
def test_engines_of_a_mixture_are_compared(shared, gpu, tmp_path):
    results = Results(built_family(shared, "mixtral", "fp16") / "results")
    paths = results.assembly("tiny", "fp16"), results.weights("tiny", "fp16")
    engines = build(paths[0], "cuda", tmp_path / "engines.json", {name: getattr(LIMITS, name) for name in SIZES})
    compare.run(*paths, engines, CONFIG.tolerance("demo-llama", "fp16", "cuda"), LIMITS, tmp_path / "c.json")
    assert read_json(tmp_path / "c.json")["result"] == "pass"


@pytest.mark.long
def test_rows_that_overflow_in_float16_are_not_compared_where_the_graph_stays_finite(gpu, tmp_path):
    """A query that is normalised behind its product: ONNX Runtime never has the product in float16, an engine has."""
    build_family(tmp_path, "olmo2", "fp16", initializer_range=1.0)
    results = Results(tmp_path / "results")
    paths = results.assembly("tiny", "fp16"), results.weights("tiny", "fp16")
    engines = build(paths[0], "cuda", tmp_path / "engines.json", {name: getattr(LIMITS, name) for name in SIZES})
    compare.run(*paths, engines, CONFIG.tolerance("demo-llama", "fp16", "cuda"), LIMITS, tmp_path / "c.json")
    assert read_json(tmp_path / "c.json")["result"] == "pass"


@pytest.mark.parametrize(
    "precision, layers",
    some(itertools.product(("bf16", "fp16"), (2, "all"))),  # fp16 with pages of fp8: test_fp8_kv_cache.py
)
def test_the_demo_says_what_transformers_says(references, demo_bf16, gpu, tmp_path, precision, layers):
    results = demo_bf16 if precision == "bf16" else references
    name = "demo-llama"
    tolerance = CONFIG.tolerance("demo-llama", precision, "cuda")
    engines = built(results, precision, tmp_path, model=name)
    pair = results.assembly(name, precision), results.weights(name, precision)
    out = tmp_path / "golden.json"
    target = Target(name, precision, layers, "cuda")
    reference = references.reference(name, layers)
    check_engines(*pair, engines, reference, target, tolerance, LIMITS, out, tmp_path / "speed.json")
    assert read_json(out)["result"] == "pass"
    if layers == "all":
        report = read_json(compare.run(*pair, engines, tolerance, LIMITS, tmp_path / "c.json", seconds=8))
        assert 0 < report["relative_error"] <= report["tolerance"]


@pytest.mark.long
def test_prompts_are_graphs_of_their_parts_and_whole_where_they_come_often(references, gpu, tmp_path, monkeypatch):
    """Alone, several in one call of attention, and with rows that decode: padded, and each as without a graph."""
    monkeypatch.setattr("lockstep_gpu.runner.CAPTURED_AFTER", 3)
    engines = built(references, "fp16", tmp_path, model="demo-llama")
    name = "demo-llama"
    pair = references.assembly(name, "fp16"), references.weights(name, "fp16")
    sizes = {size: getattr(LIMITS, size) for size in SIZES}
    model = Model.open(engines, *pair, 2, ModelOptions(**sizes))
    expected = Model.open(references.engines(name, "fp16", "onnxruntime"), *pair, 2, ModelOptions(**sizes))
    random = np.random.default_rng(0)
    following = dict[int, int]()

    def step(decoding: Sequence[int], **prompts: int) -> tuple[int, int]:
        """Take a step of both; return launches of graphs, and calls next to them."""
        advances = [Advance(slot, np.array([following[slot]]), model.length(slot)) for slot in decoding]
        advances += [
            Advance(int(slot[1:]), random.integers(0, 768, count), model.length(int(slot[1:])))
            for slot, count in prompts.items()
        ]
        launches = gpu.launches
        plain = gpu.plain
        logits = model.step(advances)
        np.testing.assert_allclose(logits, expected.step(advances), rtol=0, atol=0.1)
        following.update({item.slot: int(row.argmax()) for item, row in zip(advances, logits)})
        return gpu.launches - launches, gpu.plain - plain

    def release(*slots: int) -> None:
        for slot in slots:
            model.release(slot)
            expected.release(slot)

    layers = len(model.executor.ranks[0].network.layers)

    def often(parts: int, *takes: Callable[[], tuple[int, int]]) -> None:
        """Take alike steps; parts: graphs of each but the first, next to the exit's calls, and the fourth."""
        first, *middle, last = [take() for take in takes]
        assert first[1] > 0 and all(graphs == parts and calls > 0 for graphs, calls in middle) and last == (1, 0)

    for lengths in ((9, 12, 16, 11), (40, 64, 33, 57)):  # each padded to the same size
        prompts = ({f"s{slot}": length} for slot, length in enumerate(lengths))
        often(1 + 2 * layers, *(functools.partial(step, (), **prompt) for prompt in prompts))
        release(0, 1, 2, 3)

    def again(decoding: Sequence[int], **prompts: int) -> tuple[int, int]:
        results = step(decoding, **prompts)
        release(*(int(slot[1:]) for slot in prompts))
        return results

    often(1 + 2 * layers, *(functools.partial(again, (), s2=first, s3=32 - first) for first in (7, 9, 12, 8)))
    step((), s0=5, s1=25)
    often(1 + 3 * layers, *(functools.partial(again, (0, 1), s2=length) for length in (20, 30, 25, 19)))
    for _ in range(4):  # of longer ones, parts alone
        longest = again((), s0=110, s1=110, s2=110)
    assert longest[0] == 1 + 2 * layers
    model.warm_up()
    assert [step((), **{f"s{slot}": length}) for slot, length in enumerate((2, 70, 100))] == [(1, 0)] * 3
    release(0, 1, 2)
    assert sizes["max_seq_len"] < 270 and step((), s0=90, s1=90, s2=90)[0] == 1 + 2 * layers


@pytest.mark.parametrize("missing", ["package", "library"])
def test_a_machine_without_cublas_is_told_so(gpu, monkeypatch, missing):
    if missing == "package":
        monkeypatch.setitem(sys.modules, "nvmath", None)
        monkeypatch.delitem(sys.modules, "nvmath.bindings")
    else:
        no_file = SimpleNamespace(get_version=mock.Mock(side_effect=RuntimeError("No such file: libcublasLt.so.13")))
        monkeypatch.setattr(sys.modules["nvmath.bindings"], "cublasLt", no_file)
    with pytest.raises(InputError, match="expected the package nvmath-python and the library cuBLAS 12 or 13, "):
        libraries.require_cublas()


def test_a_cublas_that_does_not_start_is_told_by_its_version_and_status(gpu, monkeypatch):
    from lockstep_gpu.kernels.cublas_lt import CublasLt

    api = libraries.require_cublas()
    monkeypatch.setattr(api, "create", mock.Mock(side_effect=api.cuBLASLtError(1)))
    with pytest.raises(CheckError) as error:
        CublasLt(np.dtype(np.float16))
    assert str(error.value) == (
        "expected the library cuBLASLt 120804 to start, found CUBLAS_STATUS_NOT_INITIALIZED; free memory of the GPU, "
        "or name the folder of a cuBLAS for this driver in LD_LIBRARY_PATH"
    )


def test_a_cublas_without_scales_by_row_has_no_gemm_of_e4m3(gpu, monkeypatch):
    from lockstep_gpu.kernels.cublas_lt import CublasLt

    api = libraries.require_cublas()
    monkeypatch.setattr(api, "matmul_desc_set_attribute", mock.Mock(side_effect=api.cuBLASLtError(7)))
    with pytest.raises(CheckError, match="expected GEMMs of float8_e4m3fn .* found CUBLAS_STATUS_INVALID_VALUE"):
        CublasLt(named_dtype("float8_e4m3fn"), np.dtype(np.float16))


def test_a_product_that_cublas_refuses_is_told_by_its_sizes(gpu):
    from lockstep_gpu import cuda
    from lockstep_gpu.kernels.cublas_lt import CublasLt

    weight = cuda.empty((1, 24), "f2")
    x = cuda.empty((5, 24), "f2")
    algorithm = np.zeros(64, np.uint8)
    multiply = CublasLt(np.dtype(np.float16)).bind(cuda.Stream(), weight, x, cuda.empty((5, 1), "f2"))
    with pytest.raises(CheckError) as error:
        multiply(5, [algorithm.ctypes.data])
    assert "one of 1 algorithms to run, found CUBLAS_STATUS_NOT_SUPPORTED for float16, m 1, n 5, k 24, " in str(
        error.value
    )
    assert "leading dimensions 24/24/1, alignment " in str(error.value)


@pytest.mark.parametrize("most_rows", [1280, 2560])
def test_an_algorithm_that_has_other_bits_in_many_rows_alone_is_not_used_for_them(gpu, most_rows):
    from lockstep_gpu import cuda
    from lockstep_gpu.kernels import gemm

    gemm._shapes.cache_clear()
    stream = cuda.Stream()
    dtype = np.dtype(np.float16)
    weight, x = (cuda.empty((rows, 32), dtype) for rows in (64, most_rows))
    out = cuda.empty((most_rows, 64), dtype)
    rows = np.tile(gemm.trial_factors(32, dtype)[1], (most_rows // 64, 1))
    stream.upload(weight, gemm.trial_factors(32, dtype)[0])
    stream.upload(x, rows)
    multiply = gemm.Gemm(stream, dtype).bind(weight, x, [out])
    products = np.empty((most_rows, 64), dtype)
    for count in (16, 200, most_rows):
        multiply(count)
    stream.download(products, out)
    stream.synchronize()
    assert (products.view("u2").reshape(-1, 64, 64) == products[:64].view("u2")).all() and products.any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("columns", [24, 48, 4096])
def test_trials_of_products_tell_orders_of_a_sum_apart(gpu, columns, dtype):
    """As a kernel does that shares columns out among warps; with random numbers none of 24 to 80 columns differ."""
    from lockstep_gpu.kernels.gemm import trial_factors

    weight, x = (item.astype(np.float32) for item in trial_factors(columns, named_dtype(dtype)))

    def accumulated(chosen: np.ndarray) -> np.ndarray:
        sums = np.zeros((16, len(weight)), np.float32)
        for column in chosen:
            sums += x[:16, column, None] * weight[:, column]
        return sums

    order = np.arange(columns)
    shared = accumulated(order[order // 16 % 2 == 0]) + accumulated(order[order // 16 % 2 == 1])
    of_both = (sums.astype(named_dtype(dtype)) for sums in (accumulated(order), shared))
    assert np.mean(np.not_equal(*of_both)) > 0.05


@pytest.mark.long
@pytest.mark.parametrize("precision, group", [("w8a16", 32), ("w4a16", 16), ("w8a8-fp8", 32)])
def test_quantised_weights_with_activations_in_bf16(shared, gpu, tmp_path, precision, group):
    """Groups of 32 columns go through the kernel of integers, others are dequantised; the cache is bf16 too."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**FAMILIES["llama, llama3 rope"].config, **sizes}))
    make_random_checkpoint(tmp_path / "config.json", 0, tmp_path / "source")
    results = Results(tmp_path / "results")
    checkpoint = results.checkpoint("model")
    resolve(str(tmp_path / "source"), tmp_path / "source", checkpoint)
    assembly = results.assembly("model", precision)
    export(checkpoint, precision, assembly, group_size=group, activations="bfloat16")
    convert(checkpoint, precision, results.weights("model", precision), assembly)
    refer(results, precision, 2, FAMILY_ASKED)
    engines = built(results, precision, tmp_path, LIMIT)
    assert KernelsFile.load(engines.with_name("middle.kernels")).dtype == "bfloat16"
    tolerance = Tolerances(precision, "cuda").in_bfloat16
    report = checked(results, precision, 2, engines, LIMIT, tmp_path, tolerance)
    assert report["result"] == "pass"
    pair = assembly, results.weights("model", precision)
    compared = read_json(compare.run(*pair, engines, tolerance, LIMIT, tmp_path / "compare.json", seconds=8))
    assert compared["result"] == "pass"
    with pytest.raises(InputError, match="activations is not supported by backend onnxruntime; got bfloat16; export"):
        build(assembly, "onnxruntime", tmp_path / "host" / "engines.json")


def test_no_garbage_is_collected_in_a_capture(gpu: fake_gpu.Gpu) -> None:
    """Its device memory would be freed by the thread that captures, which the fake GPU reports as a fault."""
    from lockstep_gpu import cuda  # of the fake GPU

    thresholds = gc.get_threshold()
    stream = cuda.Stream()
    array = cuda.empty((4,), "f4")
    try:
        with stream.capture():
            gc.set_threshold(1)
            cycle: list[object] = [array]
            cycle.append(cycle)
            del array, cycle
            assert [[] for _ in range(100)]  # enough new objects for a collection
    finally:
        gc.set_threshold(*thresholds)
