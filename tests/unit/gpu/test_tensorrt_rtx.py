"""Building with TensorRT-RTX: the real library, which needs no GPU for it, in its own processes.

Left to the C library's heap, two builds of one graph may differ in a few bytes: that is why there is a heap whose
addresses only rise. Whether two such builds differ is chance, so nothing here asserts it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from demo_model import CONFIG, DEMO, ROOT
from onnx import TensorProto, helper
from test_tensorrt_compat import uses_of

import stage_job
from calls import call
from lockstep.artifacts.files import read_json, write_bytes, write_json
from lockstep.backends import EngineSet, build
from lockstep.backends.profiles import built_limits, profiles
from lockstep.config.load import load
from lockstep.errors import CheckError, InputError
from lockstep.export.quantize import quantize
from lockstep.onnx_tools.dequantized import DequantizeProducts
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.signature import dtype_name
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.provenance import reproduce as reproducing
from lockstep.provenance.lock import Lock
from lockstep.provenance.reproduce import LockComparison, rebuild, reproduce
from lockstep.targets import Results, Target
from lockstep.weights.groups import pack
from lockstep_gpu.backends.tensorrt import compat
from lockstep_gpu.backends.tensorrt.compat import GraphRefusedError
from lockstep_gpu.backends.tensorrt.program import sign_of
from lockstep_gpu.backends.tensorrt_rtx import compiler, gpu, library
from lockstep_gpu.backends.tensorrt_rtx.compiler import Compiler
from lockstep_gpu.backends.tensorrt_rtx.library import TENSORRT_RTX
from lockstep_gpu.backends.tensorrt_rtx.monotonic_heap import shared_object
from some import some

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)

MODEL = "demo-llama"
PRECISIONS = ("fp32", "fp16", "bf16")
BACKEND = "tensorrt_rtx"
OPTIONS = {"compute_capabilities": None, "max_batch_size": 4, "max_num_tokens": 512, "max_seq_len": 256}
BUILD = (
    "import sys; from lockstep.backends import build; from lockstep.errors import guard\n"
    "with guard(): build(sys.argv[1], 'tensorrt_rtx', sys.argv[2])"
)


@pytest.fixture(scope="session")
def assemblies(demo, demo_bf16) -> dict[str, Path]:
    """{precision: assembly.json} of the demo."""
    results = {precision: demo.assembly(MODEL, precision) for precision in ("fp32", "fp16")}
    return {**results, "bf16": demo_bf16.assembly(MODEL, "bf16")}


@pytest.fixture(scope="session")
def engine_sets(assemblies, shared) -> dict[str, Path]:
    """{precision: engines.json}, not to be changed."""

    def make(folder: Path) -> None:
        for precision, assembly in assemblies.items():
            build(assembly, BACKEND, folder / precision / "engines.json")

    return {precision: shared.folder("tensorrt_rtx", make) / precision / "engines.json" for precision in PRECISIONS}


@pytest.fixture
def copy(engine_sets, tmp_path) -> Path:
    """engines.json of the fp16 set, to be changed."""
    shutil.copytree(engine_sets["fp16"].parent, tmp_path / "copy")
    return tmp_path / "copy" / "engines.json"


@pytest.fixture
def graph(assemblies):
    """The path of an fp16 graph by its name."""
    return lambda name: assemblies["fp16"].parent / f"{name}.onnx"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.exists() else {}


def one_line(caught: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is built


@pytest.mark.parametrize("precision", some(PRECISIONS, "fp16"))
def test_a_set_has_an_engine_of_each_graph_and_says_what_it_is_for(assemblies, engine_sets, precision):
    engines = EngineSet.open(engine_sets[precision], assemblies[precision])
    assert engines.names() == ["attention.decode", "attention.prefill", "embedding", "entry", "exit", "middle"]
    manifest = engines.manifest
    assert (manifest.precision, manifest.options) == (precision, OPTIONS)
    assert manifest.device == {"type": "gpu", "name": "NVIDIA RTX GPUs"}  # no one device
    assert manifest.details == {"typing": "strong", "attention": "traced"}
    assert manifest.backend_version == engines.backend.version()
    # Without weights: the demo's are 7 MB in fp32.
    assert all((engine_sets[precision].parent / f"{name}.engine").stat().st_size < 2 << 20 for name in engines.names())


@pytest.mark.long
@pytest.mark.parametrize("precision", ["w4a16", pytest.param("w8a16", marks=pytest.mark.long)])
def test_quantised_weights_are_inputs_of_signed_integers(shared, tmp_path, precision):
    config = json.loads((DEMO / "config.json").read_text())
    files, assembly = quantize(*shared.assembled(config, "fp32"), precision, 16)
    for name, data in files.items():
        write_bytes(tmp_path / "graphs" / name, data)
    assembly.save(tmp_path / "graphs" / "assembly.json")
    engines = build(tmp_path / "graphs" / "assembly.json", BACKEND, tmp_path / "engines" / "engines.json", OPTIONS)
    assert len(list(engines.parent.glob("*.engine"))) == 6
    again = tmp_path / "again.engine"
    built = Compiler()
    built.build(tmp_path / "graphs" / "middle.onnx", again, OPTIONS)
    built.end()
    assert again.read_bytes() == (engines.parent / "middle.engine").read_bytes()
    assert again.stat().st_size < 4 << 20


@pytest.mark.parametrize("bits", [4, 8])
def test_the_form_for_this_library_says_what_matmulnbits_says(bits):
    """The same bytes but for the sign, as ONNX packs them; in ONNX Runtime the same product, and zero points of their
    own are refused."""
    random = np.random.default_rng(bits)
    rows = 24
    columns = 64
    group = 16
    integers = random.integers(0, 1 << bits, (rows, columns // group, group)).astype(np.uint8)
    data = pack(integers, bits)
    scales = random.standard_normal((rows, columns // group)).astype(np.float32)
    shapes = {"x": (TensorProto.FLOAT, ["n", columns]), "w": (TensorProto.UINT8, data.shape)}
    shapes |= {"s": (TensorProto.FLOAT, scales.shape)}
    inputs = [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", rows])]
    sizes = {"K": columns, "N": rows, "bits": bits, "block_size": group}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], "product", domain="com.microsoft", **sizes)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, out), opset_imports=opsets, ir_version=10)
    options = {"x": random.standard_normal((3, columns)).astype(np.float32), "s": scales}
    expected = open_session(model.SerializeToString()).run(None, {**options, "w": data})[0]
    model = run_passes(model, DequantizeProducts("here"))
    weight = next(value for value in model.graph.input if value.name == "w")
    kind = dtype_name(weight.type.tensor_type.elem_type)
    signed = (data ^ np.uint8(sign_of(kind, "uint8"))).tobytes()
    model.graph.input.remove(weight)
    model.graph.initializer.append(
        helper.make_tensor("w", weight.type.tensor_type.elem_type, [rows, columns], signed, raw=True)
    )
    actual = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(np.int64)
    assert kind == f"int{bits}" and np.array_equal(
        actual, integers.reshape(rows, columns).astype(int) - (1 << bits - 1)
    )
    assert np.abs(open_session(model.SerializeToString()).run(None, options)[0] - expected).max() < 1e-3
    node.input.append("z")
    refused = helper.make_model(helper.make_graph([node], "g", inputs, out), opset_imports=opsets, ir_version=10)
    with pytest.raises(
        CheckError, match="here: expected quantised weights whose zero points are the middle, found 'z'"
    ):
        run_passes(refused, DequantizeProducts("here"))


@pytest.mark.long  # the committed lock has the bytes of some
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_set_is_the_same_bytes_in_each_build(assemblies, engine_sets, tmp_path, precision):
    """By a process that hashes otherwise, with more in its environment."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "LOCKSTEP_TEST_PADDING": 5000 * "x"}
    command = [sys.executable, "-c", BUILD, str(assemblies[precision]), str(tmp_path / "again" / "engines.json")]
    subprocess.run(command, env=environment, check=True)
    assert contents(tmp_path / "again") == contents(engine_sets[precision].parent)


@pytest.mark.long
def test_an_engine_is_the_same_bytes_whatever_was_built_before_it(engine_sets, graph, tmp_path):
    """Ten engines, which is more than one process builds."""
    names = ("middle", "exit", "middle", "attention.prefill", "entry", "attention.decode", "embedding")
    built = Compiler()
    for number, name in enumerate((*names, "middle", "entry", "middle")):
        built.build(graph(name), tmp_path / f"{number}.{name}.engine", OPTIONS)
    built.end()
    expected = contents(engine_sets["fp16"].parent)
    actual = {path.name: path.read_bytes() == expected[path.name.partition(".")[2]] for path in tmp_path.iterdir()}
    assert len(actual) == 10 and all(actual.values()), actual


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory):
    """Runs Python code on the heap; gives its stdout."""
    heap = tmp_path_factory.mktemp("heap") / "heap.so"
    heap.write_bytes(shared_object())

    def run(code: str, input: str = "", **environment: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-c", code], input=input, env={**os.environ, "LD_PRELOAD": str(heap), **environment},
            stdout=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 0, f"exit code {ended.returncode}"
        return ended.stdout

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "before",
    [
        "kept = [bytearray(7919 * number % 100_003) for number in range(30_000)]",
        "kept = [bytes(n % 4096) for n in range(300_000)]; del kept[::2]",
        "import numpy, threading; [threading.Thread(target=numpy.ones, args=(n << 18,)).start() for n in range(9)]",
    ],
    ids=["more", "holes", "threads"],
)
def test_an_engine_is_the_same_bytes_behind_other_allocations(engine_sets, graph, preloaded, tmp_path, before):
    out = tmp_path / "middle.engine"
    request = {"graph": str(graph("middle")), "out": str(out), "options": OPTIONS}
    code = f"{before}\nfrom lockstep_gpu.backends.tensorrt_rtx.compiler import main\nmain()"
    assert preloaded(code, json.dumps(request) + "\n", PYTHONHASHSEED="77") == "{}\n"
    assert out.read_bytes() == (engine_sets["fp16"].parent / "middle.engine").read_bytes()


@pytest.mark.long
def test_other_compute_capabilities_are_other_bytes_and_are_recorded(assemblies, engine_sets, graph, tmp_path):
    engines = {"portable": (engine_sets["fp16"].parent / "middle.engine").read_bytes()}
    builder = Compiler()
    for capabilities in (["8.6"], ["8.9"]):
        out = tmp_path / f"{capabilities[0]}.engine"
        builder.build(graph("middle"), out, {**OPTIONS, "compute_capabilities": capabilities})
        engines[capabilities[0]] = out.read_bytes()
    builder.end()
    out = tmp_path / "both" / "engines.json"
    both = ["8.6", "8.9"]
    build(assemblies["fp16"], BACKEND, out, {"compute_capabilities": both})
    assert read_json(out)["options"]["compute_capabilities"] == both
    assert read_json(out)["digest"] != read_json(engine_sets["fp16"])["digest"]
    engines["both"] = (out.parent / "middle.engine").read_bytes()
    assert len(set(engines.values())) == len(engines) == 4


# --- the heap

ALLOCATE = """
import ctypes, threading
from ctypes import c_int, c_size_t, c_void_p
from lockstep_gpu.backends.tensorrt_rtx.monotonic_heap import FIRST, LAST

libc = ctypes.CDLL(None)

def function(name, *arguments, result=c_void_p):
    found = getattr(libc, name)
    found.argtypes, found.restype = arguments, result
    return found

malloc, calloc = function("malloc", c_size_t), function("calloc", c_size_t, c_size_t)
realloc, memalign = function("realloc", c_void_p, c_size_t), function("memalign", c_size_t, c_size_t)
aligned_alloc = function("aligned_alloc", c_size_t, c_size_t)
posix_memalign = function("posix_memalign", c_void_p, c_size_t, c_size_t, result=c_int)
usable, free = function("malloc_usable_size", c_void_p, result=c_size_t), function("free", c_void_p, result=None)
faults, taken = [], []

def hold(right, *what):
    if not right:
        faults.append(what)

def check(places, what, at, size, alignment=16):
    hold(at and FIRST <= at and at + size <= LAST and at % alignment == 0 and usable(at) >= size, what, at, size)
    ctypes.memset(at, 0xAB, size)
    places.append((at, at + max(size, 1)))

def work(number):
    places = []
    for size in (0, 1, 7, 8, 15, 16, 17, 100, 4096, 70_001):
        check(places, "malloc", malloc(size), size)
        at = calloc(size, 3)
        hold(ctypes.string_at(at, 3 * size) == bytes(3 * size), "calloc is not zero", size)
        check(places, "calloc", at, 3 * size)
        ctypes.memset(at, number, 3 * size)
        larger = realloc(at, 4 * size + 1)
        hold(larger != at and ctypes.string_at(larger, 3 * size) == bytes([number]) * 3 * size, "not copied", size)
        check(places, "realloc", larger, 4 * size + 1)
        hold(realloc(larger, size) == larger, "a smaller one moves", size)
        check(places, "realloc of nothing", realloc(None, size), size)
        for alignment in (8, 16, 64, 4096, 1 << 16):
            at = c_void_p()
            hold(posix_memalign(ctypes.byref(at), alignment, size) == 0, "refused", alignment, size)
            check(places, "posix_memalign", at.value, size, alignment)
            check(places, "aligned_alloc", aligned_alloc(alignment, size), size, alignment)
            check(places, "memalign", memalign(alignment, size), size, alignment)
    hold(places == sorted(places), "not rising")
    for start, _ in places:
        free(start)
    taken.extend(places)

threads = [threading.Thread(target=lambda n=n: [work(n) for _ in range(20)]) for n in range(1, 9)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
taken.sort()
for (_, end), (start, _) in zip(taken, taken[1:]):
    hold(end <= start, "overlap", start)
hold(calloc(1 << 62, 8) is None, "calloc of more than there is")
hold(usable(None) == 0, "malloc_usable_size of nothing")
free(None)
print(len(taken), faults[:3])
"""


def test_memory_of_the_heap_is_aligned_rising_its_own_and_as_the_c_library_promises(preloaded):
    """By eight threads at once: each call of the C library's allocator that the heap replaces."""
    assert preloaded(ALLOCATE) == f"{8 * 20 * 10 * (4 + 3 * 5)} []\n"


def test_the_heap_has_each_function_and_its_addresses_are_always_the_same(preloaded):
    """As the dynamic linker finds them. Two processes that allocate alike are given the same addresses."""
    code = (
        "import ctypes; from lockstep_gpu.backends.tensorrt_rtx.monotonic_heap import _EXPORTED, FIRST, LAST\n"
        "libc = ctypes.CDLL(None)\n"
        "class Info(ctypes.Structure): _fields_ = [(n, ctypes.c_void_p if i % 2 else ctypes.c_char_p) for i, n in "
        "enumerate(('file', 'base', 'name', 'address'))]\n"
        "for name in _EXPORTED:\n"
        "    info, at = Info(), ctypes.cast(getattr(libc, name), ctypes.c_void_p)\n"
        "    assert libc.dladdr(at, ctypes.byref(info)) and info.file.endswith(b'heap.so'), name\n"
        "    assert info.address == at.value, name\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "print(len(_EXPORTED), libc.malloc(1))"
    )
    first, second = (preloaded(code, PYTHONHASHSEED="0") for _ in range(2))
    assert first == second and first.startswith("8 ")


def test_python_and_numpy_work_on_the_heap(preloaded):
    code = (
        "import concurrent.futures, json, re, subprocess, sys, numpy as np\n"
        "random = np.random.default_rng(0)\n"
        "matrix = random.standard_normal((300, 300))\n"
        "assert np.allclose(np.linalg.inv(matrix) @ matrix, np.eye(300), atol=1e-6)\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as pool:\n"
        "    sums = list(pool.map(lambda n: int(np.sort(random.permutation(n)).sum()), range(1, 400)))\n"
        "assert sums == [n * (n - 1) // 2 for n in range(1, 400)]\n"
        "assert json.loads(json.dumps({str(n): [n] * 50 for n in range(5000)}))['77'] == [77] * 50\n"
        "text = ''.join(chr(97 + n % 26) for n in range(10**6)); assert len(re.findall('abc', text)) == 38462\n"
        "assert subprocess.run([sys.executable, '-c', 'print(1 + 1)'], capture_output=True).stdout == b'2\\n'\n"
        "print('done')"
    )
    assert preloaded(code) == "done\n"


# --- what goes wrong


def model(folder: Path, nodes: list, inputs: list, outputs: list) -> Path:
    """A graph of one block's sizes: (name, type) of inputs and outputs."""
    values = [
        [helper.make_tensor_value_info(name, kind, ["num_tokens", 64]) for name, kind in side]
        for side in (inputs, outputs)
    ]
    onnx_model = helper.make_model(
        helper.make_graph(nodes, "entry", *values), opset_imports=[helper.make_opsetid("", 18)]
    )
    onnx_model.ir_version = 9
    onnx.save(onnx_model, folder / "graph.onnx")
    return folder / "graph.onnx"


HALF = TensorProto.FLOAT16
DOUBLE = TensorProto.DOUBLE


@pytest.mark.parametrize(("nodes", "inputs", "outputs", "error", "message"), some([
    ([helper.make_node("Frobnicate", ["x"], ["y"])], [("x", HALF)], [("y", HALF)], CheckError,
        "TensorRT-RTX 1.* cannot read this graph: .*operator: Frobnicate .*Plugin not found"),
    ([helper.make_node("Cast", ["x"], ["z"], to=DOUBLE), helper.make_node("Cast", ["z"], ["y"], to=HALF)],
        [("x", HALF)],
        [("y", HALF)],
        GraphRefusedError,
        "tensor z: expected float64 as in the graph, found float32; the engine would not be of this precision$"),
    ([helper.make_node("Relu", ["x"], ["y"])], [("x", DOUBLE)], [("y", DOUBLE)], CheckError,
        r"input x: expected float64 \[-1, 64\] as in the assembly, found float32 \[-1, 64\]$"),
]))  # fmt: skip
def test_a_graph_that_is_refused_is_one_line_and_leaves_nothing(
    tmp_path, graph, engine_sets, nodes, inputs, outputs, error, message
):
    """And the process that refused it builds on."""
    built = Compiler()
    with pytest.raises(error, match=message) as caught:
        built.build(model(tmp_path, nodes, inputs, outputs), tmp_path / "out" / "x.engine", OPTIONS)
    assert one_line(caught).startswith(f"{tmp_path}/out/x.engine: ") and not contents(tmp_path / "out")
    process = built.process
    built.build(graph("entry"), tmp_path / "out" / "entry.engine", OPTIONS)
    assert built.process is process is not None
    assert contents(tmp_path / "out")["entry.engine"] == contents(engine_sets["fp16"].parent)["entry.engine"]
    built.end()
    assert process.returncode == 0


@pytest.mark.long
def test_a_builder_that_is_killed_is_one_line_and_leaves_nothing(assemblies, engine_sets, tmp_path, monkeypatch):
    """In the middle of its third engine."""
    out = tmp_path / "engines" / "engines.json"
    real = Compiler.build
    number = iter(range(99))

    def killed(self, graph, engine, options):
        if next(number) == 2:
            threading.Timer(0.1, self._process.kill).start()
        real(self, graph, engine, options)

    with monkeypatch.context() as patched:
        patched.setattr(Compiler, "build", killed)
        with pytest.raises(CheckError, match="found that the builder's process ended with exit code -9; ") as caught:
            build(assemblies["fp16"], BACKEND, out)
    assert one_line(caught).startswith(f"{out.parent}/") and not contents(out.parent)  # no manifest would name any
    build(assemblies["fp16"], BACKEND, out)
    assert contents(out.parent) == contents(engine_sets["fp16"].parent)


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_for(what, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "whom", "code"),
    [(signal.SIGINT, os.killpg, 130), (signal.SIGINT, os.kill, 130), (signal.SIGTERM, os.kill, 143),
        (signal.SIGTERM, os.killpg, 143), (signal.SIGKILL, os.kill, -9)],
    ids=["Ctrl-C", "SIGINT", "SIGTERM", "SIGTERM to all", "SIGKILL"],
)  # fmt: skip
def test_a_build_that_is_interrupted_leaves_no_process_and_no_half_file(
    assemblies, engine_sets, tmp_path, how, whom, code
):
    out = tmp_path / "engines" / "engines.json"
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(assemblies["fp16"]), str(out)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: list(out.parent.glob("*.engine")))
    (builder,) = children(process.pid)
    whom(process.pid, how)
    _, stderr = process.communicate(timeout=120)
    wait_for(lambda: not Path(f"/proc/{builder}").exists())
    files = contents(out.parent)
    expected = contents(engine_sets["fp16"].parent)
    assert process.returncode == code and "engines.json" not in files
    assert how == signal.SIGKILL or stderr.count("\n") == 1, stderr
    # Of an engine that was being written there is a temporary file at most, which the next build deletes.
    assert all(data == expected[name] for name, data in files.items() if not name.endswith(".tmp"))
    build(assemblies["fp16"], BACKEND, out)
    assert contents(out.parent) == expected


def test_a_preload_that_has_no_effect_is_one_line(tmp_path, graph, monkeypatch):
    """As where the dynamic linker ignores LD_PRELOAD."""
    monkeypatch.setattr(compiler, "shared_object", lambda: b"")
    with pytest.raises(CheckError, match="backend tensorrt_rtx: expected a builder with a monotonic heap") as caught:
        Compiler().build(graph("entry"), tmp_path / "out" / "entry.engine", OPTIONS)
    assert "ulimit -v" in one_line(caught) and not contents(tmp_path / "out")


def test_too_few_addresses_are_one_line(assemblies, tmp_path):
    """The heap takes 128 GiB of them."""
    limit = 64 << 30
    ended = subprocess.run(
        [sys.executable, "-c", BUILD, str(assemblies["fp16"]), str(tmp_path / "engines" / "engines.json")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        timeout=300,
    )
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and line.startswith("lockstep: error: "), ended.stderr
    assert "Traceback" not in ended.stderr and not contents(tmp_path / "engines")


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda data: data[: len(data) // 2], "sha256: made for .*; the file is damaged: delete it and build the engines"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "sha256: made for .*; the file is damaged"),
        (lambda data: b"", "sha256: made for .*; the file is damaged"),
        (lambda data: None, "expected the engine middle, found no file; build the engines again")],
    ids=["truncated", "one bit", "empty", "gone"],
)  # fmt: skip
def test_a_damaged_engine_is_refused_when_its_set_is_opened(assemblies, copy, damage, message):
    file = copy.parent / "middle.engine"
    data = damage(file.read_bytes())
    file.unlink() if data is None else file.write_bytes(data)
    with pytest.raises(CheckError, match=message) as caught:
        EngineSet.open(copy, assemblies["fp16"])
    assert one_line(caught).startswith(str(file))


def test_engines_of_another_version_are_refused_with_both(assemblies, copy):
    write_json(copy, {**read_json(copy), "backend_version": "1.6.0.1"})
    with pytest.raises(
        CheckError, match="tensorrt_rtx version: made for 1.6.0.1, found 1.7.*; build the engines again"
    ):
        EngineSet.open(copy, assemblies["fp16"])


# --- what a machine lacks


def config(**changes) -> dict:
    model = {"source": str(DEMO), "backends": ["onnxruntime", BACKEND], "golden": {"prompts": [{"text": "Light"}]}}
    model |= changes.pop("model", {})
    return {"models": {MODEL: model}, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backends": {BACKEND: {"compute_capabilities": ["9.0"]}}},
            r"tensorrt_rtx.compute_capabilities\[0\]: expected one of 7.5, 8.0, 8.6, 8.9, 12.0, 12.1; found '9.0'",
        ),
        (
            {"backends": {BACKEND: {"compute_capabilities": ["8.9", "8.9"]}}},
            r"backends.tensorrt_rtx.compute_capabilities\[1\]: expected each item once; found '8.9' again",
        ),
        ({"backends": {BACKEND: {"compute_capabilities": []}}}, "backends.tensorrt_rtx.compute_capabilities: expected"),
        (
            {"model": {"backend_precisions": {BACKEND: ["int4"]}}},
            r"backend_precisions.tensorrt_rtx\[0\]: expected one of",
        ),
        (
            {"model": {"backend_precisions": {"onnxruntime": ["bf16"]}}},
            r"backend_precisions.onnxruntime\[0\]: expected one of fp32, fp16, w8a16, w4a16, w8a8, w4a8, w8a8-fp8 for "
            "backend onnxruntime.*; found 'bf16'",
        ),
        (
            {"model": {"backends": ["onnxruntime"], "backend_precisions": {BACKEND: ["fp16"]}}},
            "backend_precisions.tensorrt_rtx: expected one of the model's backends",
        ),
        (
            {"model": {"backend_precisions": {BACKEND: ["fp16", "fp16"]}}},
            r"backend_precisions.tensorrt_rtx\[1\]: expected each item once; found 'fp16' again",
        ),
        ({"require_run": "perhaps"}, "require_run: expected true or false"),
    ],
)
def test_a_mistake_in_the_config_is_one_line_before_any_work(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        load(config(**changes))
    one_line(caught)


def names(config_read) -> list[str]:
    return [f"{target.precision}/{target.backend}" for target in config_read.targets()]


def test_a_backend_has_precisions_of_its_own():
    actual = load(config(model={"precisions": ["fp32", "fp16"], "backend_precisions": {BACKEND: ["bf16", "fp16"]}}))
    assert names(actual) == ["fp32/onnxruntime", "fp16/onnxruntime", "fp16/tensorrt_rtx", "bf16/tensorrt_rtx"]


def on(monkeypatch, capability: str | None) -> None:
    """A machine whose GPU has this compute capability; None: without one."""
    monkeypatch.setattr(gpu, "compute_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "built_for", "why"),
    [
        (None, None, "needs an NVIDIA GPU of compute capability 8.0, 8.6, 8.9 or 12.x, found none"),
        ("9.0", None, "needs an NVIDIA GPU of compute capability 8.0, 8.6, 8.9 or 12.x, found one of 9.0"),
        ("7.5", None, "needs an NVIDIA GPU of compute capability 8.0, 8.6, 8.9 or 12.x, found one of 7.5"),
        ("9.0", ["8.9"], "needs an NVIDIA GPU of compute capability 8.9, found one of 9.0"),
        ("8.0", ["8.6", "8.9", "12.0"], "needs an NVIDIA GPU of compute capability 8.6, 8.9 or 12.0, found one of 8.0"),
        ("8.0", None, None),
        ("8.9", None, None),
        ("12.1", None, None),
        ("7.5", ["7.5"], None),
    ],
)
def test_a_device_that_the_library_refuses_is_named(monkeypatch, capability, built_for, why):
    on(monkeypatch, capability)
    assert gpu.why_not(built_for) == why


def test_engines_are_not_loaded_where_they_cannot_run(assemblies, engine_sets, monkeypatch):
    on(monkeypatch, "9.0")
    engines = EngineSet.open(engine_sets["fp16"], assemblies["fp16"])
    with pytest.raises(
        InputError, match="backend tensorrt_rtx: needs an NVIDIA GPU .* its engines can be built here, not run$"
    ) as caught:
        engines.load("entry")
    assert ", found one of 9.0" in one_line(caught)


@pytest.mark.parametrize("required", [True, "true", "True"])
def test_checks_that_cannot_run_are_refused_where_they_are_required(monkeypatch, required):
    """Also as a text, which Snakemake's command line gives."""
    on(monkeypatch, "9.0")
    config_read = load(config(require_run=required))
    with pytest.raises(InputError, match=r"models.demo-llama.backends\[1\]: expected to run its engines") as caught:
        config_read.check_backends()
    assert ", found one of 9.0" in one_line(caught)
    on(monkeypatch, "8.9")
    config_read.check_backends()


@pytest.mark.parametrize("required", [False, "false", "False"])
def test_targets_that_cannot_run_are_built_and_not_checked(monkeypatch, required):
    on(monkeypatch, None)
    actual = load(config(require_run=required))
    actual.check_backends()
    assert names(actual) == ["fp32/onnxruntime", "fp32/tensorrt_rtx"]
    assert [actual.is_run(target) for target in actual.targets()] == [True, False]


def test_without_the_library_its_targets_are_a_mistake_or_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    with pytest.raises(InputError, match=r"models.demo-llama.backends\[1\]: expected backends that are ") as caught:
        load(config()).check_backends()
    assert one_line(caught).endswith(
        "or skip_missing_backends: true; tensorrt_rtx: the Python package tensorrt-rtx is not installed for this Python"
        ": pip install tensorrt_rtx_cu13_bindings tensorrt_rtx_cu13_libs"
    )
    for skip in (True, "true"):
        actual = load(config(skip_missing_backends=skip, require_run=True))
        actual.check_backends()
        assert names(actual) == ["fp32/onnxruntime"] and list(actual.skipped_backends()) == [BACKEND]
    (target,) = [target for target in load(config()).targets() if target.backend == BACKEND]
    with pytest.raises(InputError) as caught:
        actual.parse_target(str(target))
    assert one_line(caught) == (
        f"target: expected one that is made here, found {target}: the config skips the backend tensorrt_rtx "
        "(skip_missing_backends), for the Python package tensorrt-rtx is not installed for this Python"
        ": pip install tensorrt_rtx_cu13_bindings tensorrt_rtx_cu13_libs"
    )


def test_without_the_library_the_backend_says_so_in_one_line():
    code = (
        "import sys; sys.modules['tensorrt_rtx_bindings'] = None\nfrom lockstep.backends import get_backend\n"
        "from lockstep.errors import guard\nwith guard(): get_backend('tensorrt_rtx')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        2,
        "lockstep: error: backend tensorrt_rtx: the Python package tensorrt-rtx is not installed for this Python; "
        "install it: docs/tensorrt_rtx.md says how\n",
    )


def test_an_option_that_the_backend_does_not_know_is_one_line(assemblies, tmp_path):
    with pytest.raises(
        InputError, match="options of backend tensorrt_rtx: expected only compute_capabilities, .*found"
    ):
        build(assemblies["fp16"], BACKEND, tmp_path / "engines.json", {"optimization_level": 5})


# --- the library's Python API


@pytest.mark.parametrize("module", [compat, library], ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_attribute_that_is_named_is_in_the_library(module):
    """Where the line runs with TensorRT 11.0, whose API this library's is."""
    actual = uses_of(Path(module.__file__).read_text()).found
    absent = []
    for name, versions, line in actual:
        if (11, 0) not in versions:
            continue
        api = TENSORRT_RTX.api
        for part in name.split("."):
            api = getattr(api, part, None)
        if api is None:
            absent.append((line, name))
    assert len(actual) > (60 if module is compat else 10) and not absent


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_network_is_of_the_types_sizes_and_profiles_of_its_graph(assemblies, precision):
    """Read from the library itself, which types it strongly."""
    source = onnx.load(assemblies[precision].parent / "middle.onnx")
    builder = TENSORRT_RTX.create_builder()
    TENSORRT_RTX.use_one_thread(builder)
    network = TENSORRT_RTX.create_network(builder)
    assert network.get_flag(TENSORRT_RTX.api.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    parser = TENSORRT_RTX.parse(network, source.SerializeToString(), "middle")
    settings = TENSORRT_RTX.create_config(builder, 1 << 30, 3, None)
    TENSORRT_RTX.set_compute_capabilities(settings, ["8.6", "12.0"])
    assert settings.num_compute_capabilities == 2
    assert not settings.get_flag(TENSORRT_RTX.api.BuilderFlag.TF32)
    bounds = profiles(source, built_limits(OPTIONS))
    added = [TENSORRT_RTX.add_profile(builder, settings, profile) for profile in bounds]
    tensors = {tensor.name: tensor for tensor in TENSORRT_RTX.network_tensors(network, added)}
    assert set(tensors) == {value.name for value in (*source.graph.input, *source.graph.output)}
    kind = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision]
    types = TENSORRT_RTX.network_types(network)
    for number, profile in enumerate(bounds):
        for name, shapes in profile.items():
            assert tensors[name].profiles[number] == shapes
    assert len(bounds) == 3 and kind in types.values() and parser.num_errors == 0
    assert {tensor.dtype.name for tensor in tensors.values() if tensor.dtype.kind in "fV"} <= {kind, "float32"}
    with pytest.raises(CheckError, match="TensorRT-RTX 1.* does not build for compute capability 9.0$"):
        TENSORRT_RTX.set_compute_capabilities(settings, ["9.0"])


# --- built again, here and against another machine's lock

TARGET = Target(MODEL, "fp16", 2, BACKEND)


@pytest.fixture(scope="session")
def made(shared) -> Path:
    """A folder whose results/ has the target, recorded; not to be changed."""

    def make(folder: Path) -> None:
        write_json(folder / "config.json", CONFIG.dump())
        for stage in ("resolve", "architecture", "export", "convert", "build"):
            stage_job.main((stage, str(TARGET), str(folder / "config.json"), str(folder / "results")))

    return shared.folder("made_tensorrt_rtx", make)


def held(made, monkeypatch, lock: Path) -> dict[str, LockComparison]:
    """What `lockstep reproduce --against` holds next to the lock, by its place there."""
    on(monkeypatch, None)

    def take(config, checkpoint, target, folder, is_run, *_):
        assert not is_run
        shutil.copytree(made / "results", folder / "results")

    monkeypatch.setattr(reproducing, "make_again", take)
    return {entry.where: entry for entry in rebuild(CONFIG.dump(), DEMO, TARGET, Lock.load(lock))}


LOCK = ROOT / "locks" / "demo-llama.lock.json"
(ENGINES,) = (name for name in json.loads(LOCK.read_text())["locked"] if name.startswith(f"engines/fp16/{BACKEND}/"))


def command(folder: Path) -> subprocess.CompletedProcess:
    """Of a folder with a lock, which `held` has made ready."""
    arguments = ("reproduce", str(TARGET), "--against", str(folder / "lock.json"), "--results", str(folder / "none"))
    return call("lockstep", arguments, ROOT, os.environ)


@pytest.mark.long
def test_engines_that_cannot_run_here_are_reproduced_without_golden_tokens(made, monkeypatch, tmp_path):
    on(monkeypatch, None)
    shutil.copytree(made / "results", tmp_path / "results")
    record = reproduce(CONFIG.dump(), Results(tmp_path / "results"), TARGET, 1)
    assert record.same_rounds == 1, record.artefacts
    assert not any(place.startswith("golden") for place in record.artefacts)
