"""Engines: the same bytes each time, kept while they fit, and refused where or when they do not."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.artifacts.signature import IO
from lockstep.backends import builder, engine_set
from lockstep.backends.base import Built, get_backend
from lockstep.backends.builder import build
from lockstep.backends.cpu import THREADS_VARIABLE, core_count, cpu_count, describe_cpu, thread_count
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.config.backends import backends
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.prepare import Prepared, check_same
from lockstep.runtime import Advance, Model
from lockstep.weights import Weights
from lockstep_gpu.describe import gpu_key


@pytest.fixture
def copied(demo, tmp_path):
    """A copy of the demo's fp32 graphs and engines: (assembly.json, engines.json)."""
    shutil.copytree(demo.assembly("demo-llama", "fp32").parent, tmp_path / "graphs")
    shutil.copytree(demo.engines("demo-llama", "fp32", "onnxruntime").parent, tmp_path / "engines")
    return tmp_path / "graphs" / "assembly.json", tmp_path / "engines" / "engines.json"


def stamps(folder):
    """Return the inode of each file, which changes when it is rewritten."""
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.name != "engines.json"}


def change(path, **values):
    write_json(path, read_json(path) | values)


def test_two_builds_are_the_same_bytes(demo, copied, tmp_path):
    assembly, engines = copied
    again = build(assembly, "onnxruntime", tmp_path / "again" / "engines.json")
    files = sorted(path.name for path in engines.parent.iterdir())
    assert files == sorted(path.name for path in again.parent.iterdir())
    assert all((engines.parent / name).read_bytes() == (again.parent / name).read_bytes() for name in files)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_engines_hold_no_weights_paths_or_traces(demo, precision):
    engines = demo.engines("demo-llama", precision, "onnxruntime")
    for entry in read_json(engines)["engines"].values():
        data = (engines.parent / entry["file"]).read_bytes()
        assert len(data) < 20_000  # the smallest weight matrix alone has 23 kB
        assert b".py" not in data and str(demo.root).encode() not in data and b"/tmp" not in data


def test_one_set_covers_every_class_and_kind_and_says_what_it_was_made_for(demo):
    manifest = read_json(demo.engines("demo-llama", "fp16", "onnxruntime"), "lockstep.engines/1")
    assert sorted(manifest["engines"]) == [
        "attention.decode", "attention.prefill", "embedding", "entry", "exit", "middle",
    ]  # fmt: skip
    assert manifest["precision"] == "fp16" and manifest["backend_version"] == get_backend("onnxruntime").version()
    assert manifest["device"]["architecture"]
    assert manifest["options"] == {"optimization_level": "all", "fuse_projections": False}


def test_what_fits_is_not_built_again(copied):
    assembly, engines = copied
    before = stamps(engines.parent)
    manifest = engines.read_bytes()
    build(assembly, "onnxruntime", engines)
    assert stamps(engines.parent) == before and engines.read_bytes() == manifest


def test_only_what_changed_is_built_again_and_leftovers_go(copied):
    assembly, engines = copied
    before = stamps(engines.parent)
    manifest = engines.read_bytes()
    (engines.parent / "middle.onnx").write_bytes(b"damaged")
    (engines.parent / "exit.onnx").unlink()
    older = engines.parent / "older.onnx"
    shutil.copy(engines.parent / "entry.onnx", older)  # an engine of an earlier export
    entry = json.loads(manifest)["engines"]["entry"]
    change(engines, engines={**json.loads(manifest)["engines"], "older": {**entry, "file": older.name}})
    (engines.parent / ".entry.onnx.abc.tmp").mkdir()
    (engines.parent / ".entry.onnx.abc.tmp" / "optimized.onnx").write_bytes(b"a build that was killed")
    leftovers = {"notes.txt", "other.onnx", ".other.tmp"}
    for name in leftovers:
        (engines.parent / name).write_text("not ours")
    build(assembly, "onnxruntime", engines)
    after = stamps(engines.parent)
    assert engines.read_bytes() == manifest
    assert set(after) == {*before, *leftovers}
    assert {name for name in before if after[name] == before[name]} >= set(before) - {"middle.onnx", "exit.onnx"}
    EngineSet.open(engines, assembly)


@pytest.mark.parametrize("values", [
    {"backend_version": "0.1"}, {"builder_revision": 0}, {"options": {}},
    {"device": {"architecture": "riscv64", "isa": []}}, {"format": "older"},
])  # fmt: skip
def test_another_version_device_or_option_is_built_again(copied, values):
    assembly, engines = copied
    manifest = engines.read_bytes()
    (engines.parent / "middle.onnx").write_bytes(b"made elsewhere")
    change(
        engines,
        engines={
            name: e | {"sha256": sha256_file(engines.parent / e["file"])}
            for name, e in read_json(engines)["engines"].items()
        },
        **values,
    )
    build(assembly, "onnxruntime", engines)
    assert engines.read_bytes() == manifest
    EngineSet.open(engines, assembly)


def test_the_options_are_part_of_the_engine(copied, tmp_path):
    other = build(copied[0], "onnxruntime", tmp_path / "other" / "engines.json", {"optimization_level": "disabled"})
    assert EngineSet.open(other, copied[0]).digest() != EngineSet.open(copied[1], copied[0]).digest()
    with pytest.raises(
        InputError, match="optimization_level: expected one of all, basic, disabled, extended, found 'most'"
    ):
        build(copied[0], "onnxruntime", tmp_path / "other" / "engines.json", {"optimization_level": "most"})
    with pytest.raises(
        InputError,
        match="options of backend onnxruntime: expected only optimization_level, fuse_projections, found level",
    ):
        build(copied[0], "onnxruntime", tmp_path / "other" / "engines.json", {"level": "all"})


@pytest.mark.parametrize(("values", "message"), [
    ({"backend_version": "1.2.3"}, r"onnxruntime version: made for 1\.2\.3, found "),
    ({"device": {"architecture": "x86_64", "isa": ["avx512_from_2042"]}},
        "device: made for architecture x86_64, isa avx512_from_2042, found architecture"),
    ({"device": {"architecture": "riscv64", "isa": []}}, "device: made for architecture riscv64"),
    ({"precision": "fp16"}, "precision: made for fp16, found fp32"),
    ({"engines": {}}, "engines: made for , found attention.decode attention.prefill"),
    ({"backend": "abacus"}, f"backend: expected one of {', '.join(backends())}, found 'abacus'"),
    ({"format": "lockstep.engines/9"}, "expected format 'lockstep.engines/1', found 'lockstep.engines/9'"),
])  # fmt: skip
def test_an_engine_set_made_for_something_else_is_refused_with_both_values(copied, values, message):
    assembly, engines = copied
    change(engines, **values)
    with pytest.raises((CheckError, InputError), match=message) as error:
        EngineSet.open(engines, assembly)
    assert "\n" not in str(error.value)


def test_another_vendor_with_the_same_instructions_is_accepted(copied):
    assembly, engines = copied
    change(engines, device=read_json(engines)["device"] | {"vendor": "Other", "family": "1 2"})
    EngineSet.open(engines, assembly)


def test_graphs_of_another_export_are_refused(copied):
    assembly, engines = copied
    value = read_json(assembly)
    old = value["classes"]["middle"]["sha256"]
    value["classes"]["middle"]["sha256"] = "1" * 64
    write_json(assembly, value)
    with pytest.raises(CheckError, match=f"graph of engine middle: made for {old}, found 1111"):
        EngineSet.open(engines, assembly)


def test_a_damaged_or_missing_engine_is_refused(copied):
    assembly, engines = copied
    path = engines.parent / "middle.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckError, match=r"middle\.onnx: sha256: made for \w{64}, found \w{64}; the file is damaged"):
        EngineSet.open(engines, assembly)
    path.unlink()
    with pytest.raises(CheckError, match=r"middle\.onnx: expected the engine middle, found no file"):
        EngineSet.open(engines, assembly)


def test_a_damaged_graph_is_refused_and_the_older_set_stays(copied):
    assembly, engines = copied
    before = {path.name: path.read_bytes() for path in engines.parent.iterdir()}
    (assembly.parent / "middle.onnx").write_bytes(b"not what was exported")
    with pytest.raises(CheckError, match=r"middle\.onnx: expected sha256 \w{64}, found \w{64}; export again"):
        build(assembly, "onnxruntime", engines)
    assert {path.name: path.read_bytes() for path in engines.parent.iterdir()} == before


def test_a_graph_that_the_library_refuses_is_one_line(copied):
    assembly, engines = copied
    graph = assembly.parent / "exit.onnx"
    model = onnx.load(graph)
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, graph)
    value = read_json(assembly)
    value["classes"]["exit"]["sha256"] = sha256_file(graph)
    write_json(assembly, value)
    with pytest.raises(
        CheckError,
        match=r"exit\.onnx: ONNX Runtime .* cannot build this graph: "
        r".*NoSuchOperator",
    ) as error:
        build(assembly, "onnxruntime", engines)
    assert "\n" not in str(error.value)
    assert not list(engines.parent.glob(".*"))


def test_a_graph_with_other_inputs_than_the_assembly_says_is_refused(copied):
    assembly, engines = copied
    content = read_json(assembly)
    graph = assembly.parent / "entry.onnx"
    model = onnx.load(graph)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 145
    onnx.save(model, graph)
    content["classes"]["entry"]["sha256"] = sha256_file(graph)
    write_json(assembly, content)
    (engines.parent / "entry.onnx").unlink()
    with pytest.raises(
        CheckError,
        match=r"entry.onnx: input 'hidden': expected float32 \[num_tokens, 144\], "
        r"found float32 \[num_tokens, 145\]; export again",
    ):
        build(assembly, "onnxruntime", engines)


class Slow(OnnxRuntimeBackend):
    """A backend whose builds are worth a line each, and take some device memory."""

    takes_long = True

    def build(self, graph_path, out_path, options):
        if out_path.name == self.fails:
            raise CheckError(f"{out_path}: out of memory")
        super().build(graph_path, out_path, options)
        return Built({"said": out_path.stem}, 3 << 20, "warm to the touch" if out_path.stem == "middle" else None)


def test_a_long_build_has_a_line_and_a_record_for_each_engine(copied, tmp_path, monkeypatch, capsys):
    Slow.fails = None
    monkeypatch.setattr(builder, "get_backend", lambda name: Slow())
    out = build(copied[0], "onnxruntime", tmp_path / "slow" / "engines.json")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"build: engine 1 of 6: embedding \.\.\. [0-9.]+ s, 3 MiB of GPU " r"memory", lines[0])
    assert len(lines) == 6
    assert [line.split()[5] for line in lines if line.endswith(" 3 MiB of GPU memory; warm to the touch")] == ["middle"]
    costs = read_json(out.parent / "build.costs.json", "lockstep.build_costs/1")["engines"]
    manifest = read_json(out)
    assert set(costs) == set(manifest["engines"]) and costs["entry"]["peak_memory_bytes"] == 3 << 20
    assert costs["entry"]["seconds"] > 0
    assert "seconds" not in out.read_text() and manifest["engines"]["entry"]["said"] == "entry"
    assert set(costs["middle"]) == {"seconds", "peak_memory_bytes"}
    (out.parent / "exit.onnx").unlink()
    build(copied[0], "onnxruntime", out)
    assert list(read_json(out.parent / "build.costs.json")["engines"]) == ["exit"]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_build_that_fails_says_in_which_engine(copied, tmp_path, monkeypatch, capsys):
    Slow.fails = "exit.onnx"
    monkeypatch.setattr(builder, "get_backend", lambda name: Slow())
    with pytest.raises(CheckError, match="exit.onnx: out of memory"):
        build(copied[0], "onnxruntime", tmp_path / "slow" / "engines.json")
    assert re.fullmatch(
        r"build: engine 3 of 6: exit \.\.\. failed after "
        r"[0-9.]+ s",
        capsys.readouterr().err.splitlines()[-1],
    )


def test_a_build_that_is_killed_has_said_in_which_engine(copied, tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from lockstep.backends import builder
from lockstep.backends.builder import build
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
class Slow(OnnxRuntimeBackend):
    takes_long = True
    def build(self, graph_path, out_path, options):
        if out_path.name == "exit.onnx":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build(graph_path, out_path, options)
builder.get_backend = lambda name: Slow()
build(Path(sys.argv[1]), "onnxruntime", Path(sys.argv[2]))"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(copied[0]), str(tmp_path / "killed" / "engines.json")],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL and ended.stderr.endswith("\nbuild: engine 3 of 6: exit ...")


def test_an_engine_that_the_backend_does_not_keep_is_built_again(copied, monkeypatch):
    before = stamps(copied[1].parent)
    monkeypatch.setattr(OnnxRuntimeBackend, "keeps", lambda self, name, entry: name != "exit")
    build(*copied[:1], "onnxruntime", copied[1])
    after = stamps(copied[1].parent)
    assert {name for name in before if after[name] != before[name]} == {"exit.onnx"}


def test_a_plan_for_another_gpu_is_told_with_both(tmp_path):
    recorded, present = (
        {"name": "NVIDIA H200", "compute_capability": capability, "driver": "570.86"} for capability in ("9.0", "8.9")
    )
    message = (
        "x.json: device: made for name NVIDIA H200, compute_capability 9.0, driver 570.86, found name "
        "NVIDIA H200, compute_capability 8.9, driver 570.86; build"
    )
    with pytest.raises(CheckError, match=message):
        engine_set.check_same(Path("x.json"), "device", gpu_key(recorded), gpu_key(present), "build")


def test_a_precision_that_the_backend_lacks_is_refused(copied, monkeypatch):
    assembly, engines = copied
    monkeypatch.setattr(OnnxRuntimeBackend, "precisions", ("fp16", "bf16"))
    with pytest.raises(
        InputError, match=r"precision: expected one of fp16, bf16 \(backend onnxruntime\), found 'fp32'"
    ):
        build(assembly, "onnxruntime", engines)


def test_a_missing_graph_or_assembly_is_refused(copied, tmp_path):
    assembly, engines = copied
    (assembly.parent / "entry.onnx").unlink()
    with pytest.raises(InputError, match=r"entry\.onnx: expected a graph, found no file; export again"):
        build(assembly, "onnxruntime", engines)
    with pytest.raises(InputError, match="expected a file, found none"):
        build(tmp_path / "none.json", "onnxruntime", engines)


# --- binding and running
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fused(tmp_path):
    """A product with one slot for two stacked tensors: (program, weights of a, b and c)."""
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[num_tokens, 4] hidden, float[5, 4] both) => (float[num_tokens, 5] out) { out = Gemm<transB=1>(hidden, both) }"""  # noqa: E501
    onnx.save(onnx.parser.parse_model(text), tmp_path / "g.onnx")
    arrays = {
        "a": np.arange(8, dtype=np.float32),
        "b": np.arange(100, 112, dtype=np.float32),
        "c": np.arange(5, dtype=np.float32),
    }
    shapes = {"a": [2, 4], "b": [3, 4], "c": [5]}
    (tmp_path / "w.bin").write_bytes(b"".join(array.tobytes() for array in arrays.values()))
    offsets = {"a": 0, "b": 32, "c": 80}
    tensors = {
        n: {"file": 0, "offset": offsets[n], "length": arrays[n].nbytes, "dtype": "F32", "shape": shapes[n]}
        for n in arrays
    }
    files = [{"path": "w.bin", "size": 100, "sha256": sha256_file(tmp_path / "w.bin")}]
    write_json(
        tmp_path / "weights.json",
        {"format": "lockstep.weights/1", "precision": "fp32", "files": files, "tensors": tensors},
    )
    backend = get_backend("onnxruntime")
    backend.build(tmp_path / "g.onnx", tmp_path / "engine.onnx", backend.default_options())
    slots = [IO("both", "float32", (5, 4))]
    return lambda low: backend.load(tmp_path / "engine.onnx", slots, None, low), Weights.open(tmp_path / "weights.json")


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_slot_of_several_tensors_holds_them_one_after_another(fused, low_memory):
    load, weights = fused
    hidden = np.array([[1, 0, 2, 0]], np.float32)
    out = np.empty((1, 5), np.float32)
    run = load(low_memory).bind(weights, {"both": ["a", "b"]}).prepare({"hidden": hidden}, {"out": out})
    run()
    expected = np.concatenate([weights["a"], weights["b"]])
    np.testing.assert_array_equal(out, hidden @ expected.T)
    hidden[:] = [[0, 3, 0, 0]]  # a prepared call reads its buffers at each call
    run()
    np.testing.assert_array_equal(out, hidden @ expected.T)


def test_weights_and_arrays_that_do_not_fit_are_refused(fused):
    load, weights = fused
    program = load(False)
    with pytest.raises(CheckError, match=r"slot both: expected weights float32 \[5, 4\], found float32 "):
        program.bind(weights, {"both": ["a", "a"]})
    with pytest.raises(CheckError, match=r"slot both: expected weights float32 \[5, 4\], found float32 \[5\]"):
        program.bind(weights, {"both": ["c"]})
    with pytest.raises(CheckError, match=r"expected weights for the slots both, found other"):
        program.bind(weights, {"other": ["a"]})
    executable = program.bind(weights, {"both": ["a", "b"]})
    with pytest.raises(CheckError, match=r"expected arrays for \['hidden'\], found \['token'\]"):
        executable.prepare({"token": np.zeros((1, 4), np.float32)}, {"out": np.zeros((1, 5), np.float32)})
    with pytest.raises(CheckError, match="expected a contiguous array for 'hidden'"):
        executable.prepare({"hidden": np.zeros((4, 1), np.float32).T[:, ::-1]}, {"out": np.zeros((1, 5), np.float32)})
    with pytest.raises(CheckError, match="'hidden': expected float32, found float64"):
        executable.prepare({"hidden": np.zeros((1, 4))}, {"out": np.zeros((1, 5), np.float32)})


# --- the device
# -------------------------------------------------------------------------------------------------------------

AMD = (
    "processor : 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 97\nflags\t\t: fpu sse4_1 avx "
    "avx2 fma f16c avx512f xsave\n\nprocessor : 1\nflags : fpu\n"
)
ARM = (
    "processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp sve bf16 cpuid\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
)


def test_a_cpu_is_described_by_what_its_kernels_depend_on():
    assert describe_cpu(AMD, "AMD64") == {
        "architecture": "x86_64",
        "vendor": "AuthenticAMD",
        "family": "25 97",
        "isa": ["avx", "avx2", "avx512f", "f16c", "fma", "sse4_1"],
    }
    assert describe_cpu(ARM, "arm64") == {
        "architecture": "aarch64",
        "vendor": "0x41",
        "family": "0xd40",
        "isa": ["asimd", "asimddp", "asimdhp", "bf16", "sve"],
    }
    assert describe_cpu("", "riscv64") == {"architecture": "riscv64", "vendor": "", "family": "", "isa": []}


def test_threads_come_from_the_argument_then_the_environment_then_the_machine(monkeypatch):
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    assert thread_count() >= 1
    monkeypatch.setenv(THREADS_VARIABLE, "3")
    assert thread_count() == 3 and thread_count(5) == 5
    for text in ("0", "many", "-1"):
        monkeypatch.setenv(THREADS_VARIABLE, text)
        with pytest.raises(InputError, match="expected"):
            thread_count()


def test_threads_are_as_many_as_cores_and_as_the_cgroup_allows(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    for cpu in range(8):
        write_text(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}"
        )
    assert (cpu_count(tmp_path), core_count(tmp_path)) == (8, 4)
    write_text(tmp_path / "proc/self/cgroup", "0::/pods/one\n")
    write_text(tmp_path / "sys/fs/cgroup/pods/one/cpu.max", "max 100000")
    write_text(tmp_path / "sys/fs/cgroup/pods/cpu.max", "250000 100000")
    assert (cpu_count(tmp_path), core_count(tmp_path)) == (3, 3)
    write_text(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000")
    write_text(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert core_count(tmp_path) == 1


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_process_has_one_number_of_threads(copied):
    engines = EngineSet.open(copied[1], copied[0])
    engines.load("entry")
    used = thread_count()
    with pytest.raises(
        InputError, match=f"threads: expected {used}, which this process already uses, found {used + 1}"
    ):
        engines.load("entry", threads=used + 1)


def test_nothing_of_this_machine_stands_in_a_manifest(demo):
    text = json.dumps(read_json(demo.engines("demo-llama", "fp32", "onnxruntime")))
    assert str(Path.home()) not in text and str(demo.root) not in text


def test_a_set_of_fused_graphs_gives_the_same_logits(demo, tmp_path):
    """As a backend asks for that runs q, k and v as one product: the checkpoint's tensors are placed
    side by side."""
    options = {"fuse_projections": True}
    assembly = demo.assembly("demo-llama", "fp32")
    weights = demo.weights("demo-llama", "fp32")
    built = build(assembly, "onnxruntime", tmp_path / "engines.json", options)
    parts = read_json(built)["engines"]["middle"]["parts"]
    assert [name for name in parts if " + " in name] == [
        "current.self_attn.q_proj.weight + current.self_attn.k_proj.weight + current.self_attn.v_proj.weight",
        "previous.mlp.gate_proj.weight + previous.mlp.up_proj.weight",
    ]
    logits = []
    for engines in (demo.engines("demo-llama", "fp32", "onnxruntime"), built):
        model = Model.open(engines, assembly, weights)
        logits.append(model.step([Advance(0, np.array([5, 90, 300, 7]), 0), Advance(1, np.array([8]), 0)]))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4  # fp32, logits near 10: the order of sums


def test_a_rewritten_graph_that_computes_something_else_is_refused():
    text = (
        '<ir_version: 10, opset_import: ["": 20]> g (float[num_tokens, 4] hidden, float[2, 4] w) => '
        "(float[num_tokens, 2] y) { y = Gemm<%s>(hidden, w) }"
    )
    model = onnx.parser.parse_model(text % "transB = 1")
    wrong = onnx.parser.parse_model(text % "transB = 1, alpha = 0.95")
    with pytest.raises(CheckError, match="the rewritten graph is not equivalent"):
        check_same(model, Prepared(wrong, [{"name": "w", "dtype": "float32", "shape": [2, 4]}], {"w": ["w"]}))


@pytest.mark.parametrize("wrong", ["w0, w1 = Split<axis = 0>(w, rows)  both = Concat<axis = 0>(w1, w0)  y = "
"Gemm<transB = 1>(hidden, both)  z = Gemm<transB = 1>(hidden, v)",
                                   "y = Gemm<transB = 1>(hidden, v)  z = Gemm<transB = "
"1>(hidden, w)"], ids=["rows", "weights"])  # fmt: skip
def test_large_weights_differ_in_every_row_and_from_each_other(wrong):
    """Their values repeat, so rows and weights that change places must still show."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[num_tokens, 1024] hidden, float[3072, 1024] w, float[3072, 1024] v) => (float[num_tokens, 3072] y, float[num_tokens, 3072] z)
    <int64[2] rows = {1024, 2048}> { BODY }"""  # noqa: E501
    model = onnx.parser.parse_model(
        text.replace("BODY", "y = Gemm<transB = 1>(hidden, w)  z = Gemm<transB = 1>(hidden, v)")
    )
    slots = [{"name": name, "dtype": "float32", "shape": [3072, 1024]} for name in "wv"]
    check_same(model, Prepared(model, slots, {name: [name] for name in "wv"}))
    with pytest.raises(CheckError, match="output y: .*: the rewritten graph is not equivalent"):
        check_same(
            model,
            Prepared(onnx.parser.parse_model(text.replace("BODY", wrong)), slots, {name: [name] for name in "wv"}),
        )
