"""Benchmarks: children are measured, contestants agree on a tiny shape, tables say what the record says, what is
missing is said first."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import gpu, gpu_transformers, peers, peers_table, throughput
from benchmarks.__main__ import bench
from benchmarks.child import run_child
from click.testing import CliRunner

import fake_gpu
from lockstep import make_random_checkpoint
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json, write_json
from lockstep.backends import build
from lockstep.errors import InputError
from lockstep.provenance import code_identity
from lockstep.runtime import Advance, Model

MODEL = "demo-llama"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}

# Another rotary base, epsilon and head size than Llama-2's.
SHAPE = {
    **TINY,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "rms_norm_eps": 0.05,
    "head_dim": 16,
    "eos_token_id": [7, 2],
}


@pytest.mark.long
@pytest.mark.exports
def test_small_weights_are_timed_beside_fp32(tmp_path):
    (tmp_path / "shape.json").write_text(json.dumps(TINY))
    folder = make_random_checkpoint(tmp_path / "shape.json", 0, tmp_path / "tiny")
    arguments = ["small-weights", "--model", str(folder), "--batch", "1", "--group", "32", "--context", "4"]
    arguments += ["--steps", "2", "--rounds", "1", "--prompt", "8", "--write", str(tmp_path)]
    ended = CliRunner().invoke(bench, arguments)
    assert ended.exit_code == 0, ended.output
    record = read_json(tmp_path / "bench" / "small_weights.json")
    names = {"fp32", "w8a16, groups of 32", "w4a16, groups of 32"}
    names |= {f"openvino {name}" for name in (*names, "bf16")}
    lacking = record["not_measured"]  # where it is not installed, or the CPU has no bf16
    names = {name for name in names if name.partition(",")[0] not in lacking}
    assert set(record["batch"]["1"]["seconds_per_step"]) == set(record["prompt"]["seconds"]) == names
    assert lacking["bf16"] == "ONNX Runtime on CPU has no bf16 kernels" and record["cpu_name"]
    sizes = record["megabytes_of_weights_a_step"]
    assert sizes["fp32"] > sizes["w8a16, groups of 32"] >= sizes["w4a16, groups of 32"] > 0
    assert record["seconds_of"] == "wall time" and record["memory_gigabytes_per_s"] > 0


def entry(label: str, seconds: float, written: int, rate: float, **more) -> dict:
    def three(value):
        return {"min": value * 0.9, "median": value, "max": value * 1.1}

    return {
        "label": label,
        "versions": {"transformers": "5.23.0"},
        "notes": [],
        **more,
        "export": {
            "seconds": three(seconds),
            "cpu_seconds": three(seconds),
            "peak_memory_mb": three(100 * seconds),
            "bytes_written": written,
        },
        "decode": {"tokens_per_second": three(rate), "open_seconds": three(1.0), "peak_memory_mb": three(500.0)},
    }


@pytest.fixture
def record() -> dict:
    def three(value):
        return {"min": value, "median": value, "max": value}

    contestants = {
        "lockstep": entry("lockstep", 4.0, 2_000_000, 5.0),
        "optimum": entry("optimum", 60.0, 4_400_000_000, 5.5, notes=["ran with an older transformers."]),
        "genai": {
            "label": "onnxruntime-genai",
            "versions": {},
            "notes": [],
            "reason": "skipped: 12 GB of free memory wanted, 3 GB found",
        },
    }
    return {
        "benchmark": "peers",
        "command": "python -m benchmarks peers --work FOLDER",
        "shape": "llama-1.1b",
        "precision": "fp32",
        "checkpoint_bytes": 4_400_000_000,
        "context": 64,
        "steps": 32,
        "rounds": 3,
        "repeats": 2,
        "load_average": {"min": 0.5, "median": 1.0, "max": 1.5},
        "contestants": contestants,
        "threads": 2,
        "lockstep_relative_to": {
            key: {"optimum": three(value)} for key, value in (("seconds", 15.0), ("peak_memory", 7.0), ("decode", 0.91))
        },
        "cpu": {"architecture": "x86_64", "vendor": "V", "family": "6", "isa": ["avx2"]},
        "versions": {},
    }


def test_tables_say_what_is_reached_what_is_missed_and_who_is_absent(record):
    text = peers_table.render(record)
    assert "| optimum | 60.0 | 60.0 | 6.3 GB | 4.4 GB | 5.23.0 |" in text
    assert "| 0.91 (0.91 - 0.91) |" in text
    assert "Aim: a runnable model 10 times faster than the best of them: reached (optimum 15.00)" in text
    assert "Aim: 8 times less memory than the best of them: missed (optimum 7.00)" in text
    assert "Aim: decoding no slower than the best of them: missed (optimum 0.91)" in text
    assert "no weight bytes written: reached (2.0 MB" in text
    assert "onnxruntime-genai is not in a table: skipped: 12 GB" in text
    assert "ran with an older transformers." in text


def test_writing_replaces_its_own_part_and_leaves_the_rest(record, tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n\n## Export\n\nfirst\n")
    peers_table.write(record, tmp_path)
    once = page.read_text()
    page.write_text(once + "\n## Decode\n\nlast\n")
    peers_table.write(record, tmp_path)
    text = page.read_text()
    assert text.count("## Side by side") == 1 and text.count(peers_table.BEGIN) == 1
    assert text.index("first") < text.index("## Side by side") < text.index("last")
    assert json.loads((tmp_path / "bench" / "peers.json").read_text()) == record


def test_a_childs_memory_and_time_are_its_own(tmp_path):
    usage = run_child([sys.executable, "-c", "block = b'x' * (300 << 20); sum(range(3_000_000))"], tmp_path / "log", 60)
    assert usage.reason is None
    assert usage.peak_mb > 300  # the block; the interpreter comes on top
    assert 0 < usage.cpu_seconds and 0 < usage.seconds < 60


def test_a_child_that_fails_or_hangs_says_so(tmp_path):
    assert (
        run_child([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log", 60).reason
        == "exit code 1: no such model"
    )
    usage = run_child([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 1)
    assert usage.reason == "not done after 1 s" and usage.seconds < 30


def test_unknown_contestants_and_shapes_are_named(tmp_path):
    with pytest.raises(InputError, match="found nobody"):
        peers.run(tmp_path, "llama-1.1b", peers.Settings(), ("nobody",))
    with pytest.raises(InputError, match="expected a model's config.json.*llama-1.1b"):
        peers.run(tmp_path, "no-such-shape", peers.Settings(), ("lockstep",))


def test_pins_of_the_environments_are_exact_and_keep_our_torch():
    ours = {
        line
        for line in (peers.REPOSITORY / "envs" / "requirements.txt").read_text().splitlines()
        if line.startswith("torch==")
    }
    for contestant in peers.CONTESTANTS.values():
        if contestant.pins:
            lines = (peers.REPOSITORY / "envs" / contestant.pins).read_text().splitlines()
            pins = [line for line in lines if line and not line.startswith("#")]
            assert all(line.count("==") == 1 for line in pins)
            assert ours <= set(pins)


@pytest.mark.long
def test_contestants_of_our_environment_agree_on_a_tiny_shape(tmp_path):
    (shape := tmp_path / "tiny.json").write_text(json.dumps(TINY))
    settings = peers.Settings(rounds=1, context=8, steps=4, repeats=1)
    record = peers.run(tmp_path / "work", str(shape), settings, ("lockstep", "torch", "transformers"))
    ours, torch = record["contestants"]["lockstep"], record["contestants"]["torch"]
    for found in (ours, torch):
        assert "reason" not in found
        assert found["decode"]["tokens_equal"]
        assert found["decode"]["largest_logit_difference"] < 1e-4  # fp32, logits near 1: the order of sums
        assert found["export"]["peak_memory_mb"]["median"] > 100  # torch alone is larger
    written = [path.suffix for path in Path(tmp_path / "work" / "out" / "lockstep").rglob("*")]
    assert ".safetensors" not in written  # the weights are read where they are
    assert set(record["lockstep_relative_to"]["decode"]) == {"torch", "transformers"}
    assert "lockstep" in peers_table.render(record)


@pytest.mark.parametrize("command", ["gpu", "batches", "adapters-gpu", "ranks"])
@pytest.mark.parametrize("backend", ["cuda", "tensorrt"])
def test_what_a_backend_lacks_here_is_one_line_before_anything_is_made(tmp_path, monkeypatch, command, backend):
    monkeypatch.setattr("lockstep.backends.gpu.ask_driver", lambda: None)  # no GPU, on a machine with one too
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    ended = CliRunner().invoke(bench, [command, "--work", str(tmp_path / "work"), "--backend", backend])
    assert ended.exit_code == 2 and ended.stderr.startswith(f"lockstep: error: backend {backend}: "), ended.stderr
    assert "Traceback" not in ended.stderr and not (tmp_path / "work").exists()


@pytest.mark.exports
@pytest.mark.long
def test_a_shape_exported_alone_runs_on_the_random_weights_of_the_gpu_benchmark(tmp_path, shared):
    """All but the GPU: what the benchmark makes opens and steps, and its weights are as their manifest says."""
    assembly = shared.exported(SHAPE, "fp16") / "assembly.json"
    weights = gpu.random_weights(Assembly.load(assembly), tmp_path / "weights")
    model = Model.open(
        build(assembly, "onnxruntime", tmp_path / "engines" / "engines.json"), assembly, weights, "all", 2, 16
    )
    (logits,) = model.step([Advance(0, np.arange(5), 0)])
    assert model.eos_token_ids == (2, 7) and np.isfinite(logits).all() and logits.std() > 0
    whole = (tmp_path / "weights" / "weights.bin").read_bytes()
    (tmp_path / "weights" / "weights.bin").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="weights.bin: expected sha256"):
        Model.open(tmp_path / "engines" / "engines.json", assembly, weights, "all", 2, 16)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_gpu_benchmark_runs_beside_transformers_own_model_of_the_shape(tmp_path, shared, tied):
    """On a CPU: what its engines are checked against is the model of the config."""
    config = {**SHAPE, "tie_word_embeddings": True} if tied else SHAPE
    assembly = shared.exported(config, "fp16") / "assembly.json"
    weights = gpu.random_weights(Assembly.load(assembly), tmp_path / "weights")
    request = {
        "weights": str(weights),
        "work": str(tmp_path),
        "prompt": 20,
        "tokens": 4,
        "config": config,
        "device": "cpu",
    }
    gpu_transformers.reference(request, 2)
    saved = np.load(tmp_path / "reference-2.npz")
    model = Model.open(
        build(assembly, "onnxruntime", tmp_path / "engines" / "engines.json"), assembly, weights, 2, 1, 32
    )
    (logits,) = model.step([Advance(0, saved["prompt"], 0)])
    rounding = np.abs(saved["fp16"][0] - saved["fp32"][0]).max()
    assert np.abs(logits - saved["fp32"][0]).max() <= 2 * rounding < 0.01 * saved["fp32"].std(), (
        "the benchmark's own bound"
    )


@pytest.mark.parametrize(
    ("python", "found"), [("/no/such/python", "expected a Python with torch and transformers, found none "
"that starts: No such file or directory"),
                          (sys.executable, "expected a Python whose torch and transformers run on the GPU, "
"found: .*; install them there")]
)  # fmt: skip
def test_transformers_that_cannot_run_beside_it_are_told_before_anything_is_made(
    tmp_path, shared, monkeypatch, python, found
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU, on a machine with one too
    with pytest.raises(InputError, match=found):
        gpu.run(
            shared.exported(SHAPE, "fp16") / "assembly.json",
            tmp_path / "work",
            tmp_path / "record.json",
            1,
            "cuda",
            {},
            None,
            python,
            TINY,
        )
    assert not list(tmp_path.iterdir())


def test_engines_that_do_not_open_end_the_benchmark_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"^\S*assembly.json: expected a file"):
        gpu.ready_seconds(None, tmp_path / "engines.json", tmp_path / "assembly.json", tmp_path / "weights.json")


def test_agreement_counts_the_tokens_that_differ_and_says_how_near_they_were():
    exact = np.array([[0.0, 1.0, 0.9], [2.0, 0.0, 0.0], [0.0, 0.0, 3.0]], np.float32)
    ours = exact + np.array([[0, -0.0625, 0.0625], [0, 0, 0], [0, 0, 0]], np.float32)
    found = gpu.agreement(ours, exact, exact - np.float32(0.03125))
    assert found["same_tokens"] == 2 and found["same_tokens_of_transformers_fp16"] == 3 and found["tokens"] == 3
    assert found["preferred_by"] == pytest.approx(0.1) and found["preferred_by"] <= 2 * found["max_logit_error"]
    assert found["passes"] and not gpu.agreement(ours, exact, exact - np.float32(0.03))["passes"], (
        "0.0625 is twice 0.03125"
    )


@pytest.mark.parametrize("whose", ["max_logit_error", "max_logit_error_of_transformers_fp16"])
def test_logits_that_are_not_finite_agree_with_nothing_and_can_be_recorded(tmp_path, whose):
    exact = np.array([[0.0, 1.0, 0.9]], np.float32)
    spoilt = np.array([[0.0, np.nan, 0.9]], np.float32)
    found = gpu.agreement(*((spoilt, exact, exact) if whose == "max_logit_error" else (exact, exact, spoilt)))
    assert found[whose] is None and not found["passes"]
    write_json(tmp_path / "record.json", found)


def test_a_shape_that_is_no_llama_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "gpt2.json").write_text('{"model_type": "gpt2"}')
    ended = CliRunner().invoke(bench, ["gpu", "--work", str(tmp_path / "work"), "--shape", str(tmp_path / "gpt2.json")])
    assert ended.exit_code == 2 and ended.stderr.splitlines() == [
        f"lockstep: error: {tmp_path}/gpt2.json: model_type: expected llama, which is what runs beside it in "
        f"transformers, found 'gpt2'; name another shape"
    ]


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("optimization_level", "'optimization_level'"),
        ("tactic_sources=[jit", "'tactic_sources=[jit'"),
        ("tactics=record", "'tactics=record'"),
    ],
)
def test_an_option_of_the_gpu_benchmark_that_is_no_json_is_one_line(tmp_path, option, found):
    ended = CliRunner().invoke(bench, ["gpu", "--work", str(tmp_path / "work"), "--option", option])
    assert ended.exit_code == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        f"Error: Invalid value for '--option': expected NAME=JSON, such "
        f"as optimization_level=3 or tactics='\"record\"', found {found}"
    )
    assert not (tmp_path / "work").exists()


FAKE_GPU = """#!/bin/sh
exec {python} -c '
import sys
sys.path[:0] = {paths}
import fake_gpu
from lockstep.pipeline import worker
from benchmarks import gpu
gpu.CONTEXT, gpu.PREFILL, gpu.WARM, gpu.STEPS = 20, 40, 2, 4
with fake_gpu.installed("8.6.0") as device:
    worker.main()
    assert not device.faults'
"""
TRANSFORMERS = """#!{python}
import json, sys
sys.path[:0] = {paths}
from benchmarks import gpu_transformers
request = json.load(sys.stdin)
for layers in request.get("layers", ()):
    gpu_transformers.reference({{**request, "device": "cpu"}}, layers)
print(json.dumps({{"torch": gpu_transformers.torch.__version__}}))
"""


@pytest.mark.long  # its parts are looked at above and in test_bench_dag.py, test_bench_ranks.py
@pytest.mark.exports
def test_the_benchmark_goes_from_a_shape_to_its_record(tmp_path, monkeypatch):
    """The command, through interpreters that only their own scripts make what they are, as an environment for TensorRT
    8.6 may be. References are real, of transformers on a CPU; its speeds need a GPU and are left out."""
    paths = [
        str(Path(fake_gpu.__file__).parents[1]),
        str(Path(gpu.__file__).parents[1]),
        str(code_identity.SOURCES.parent),
    ]
    python, transformers, shape, work = (tmp_path / name for name in ("python", "transformers", "tiny.json", "work"))
    for script, text in ((python, FAKE_GPU), (transformers, TRANSFORMERS)):
        script.write_text(text.format(python=sys.executable, paths=json.dumps(paths)))
        script.chmod(0o755)
    shape.write_text(json.dumps({**TINY, "num_hidden_layers": 3, "max_position_embeddings": 2048}))
    monkeypatch.setattr(sys, "executable", str(transformers))
    command = [
        "gpu",
        "--backend",
        "tensorrt",
        "--shape",
        shape,
        "--python",
        python,
        "--work",
        work,
        "--write",
        tmp_path,
        "--rounds",
        1,
        "--option",
        "workspace_mb=64",
    ]
    ended = CliRunner().invoke(bench, list(map(str, command)), catch_exceptions=False)
    assert ended.exit_code == 0 and ended.stdout == f"{tmp_path}/gpu/tiny-tensorrt.json\n"
    record = read_json(tmp_path / "gpu" / "tiny-tensorrt.json")
    assert record["options"]["workspace_mb"] == 64 and record["versions"]["tensorrt"] == "8.6.0"
    assert list(record["check"]) == ["2", "all"] and all(
        found["passes"] and found["same_tokens"] == 16 for found in record["check"].values()
    )
    made = record["build"]
    assert (
        made["other_tactics"] == ["middle: layer product: expected tactic one as recorded, found tactic another"]
        and made["engine_bytes"]
        and made["cold_seconds"] > 0
        and made["cached_seconds"] > 0
        and record["ready_seconds"] > 0
    )
    assert (
        set(record["decode"]) == {"1", "16"}
        and record["prefill"]["tokens"] == 40
        and {"block", "gaps"} < set(record["prefill"]["microseconds"])
    )
    blocks = record["as_they_are"]["microseconds_of_blocks"]
    assert (
        set(blocks) == {"1", "16", "prompt"}
        and min(blocks.values()) > 0
        and record["as_they_are"]["cold_seconds"] > 0
        and record["as_they_are"]["optimization_level"] == 4
    )
    assert read_json(work / "as-they-are" / "engines.json")["options"]["one_region"] is False
    assert record["transformers"]["torch"]
    # All tokens go through the first two layers and to the third one's queries, keys and values; one row through the
    # rest of it and lm_head.
    qkv, rest, head = 64 * (64 + 2 * 32), 64 * 64 + 3 * 64 * 96, 64 * 256
    seen = 4 * (16 + 16) * 3 * sum(range(1, 11))  # heads, the two products of a layer, layers, tokens
    assert gpu.operations(Assembly.load(work / "graphs" / "assembly.json"), 10) == (
        2 * 10 * (3 * qkv + 2 * rest),
        2 * seen + 2 * (rest + head),
    )


def test_throughput_runs_a_prefix_of_whole_chunks(demo):
    paths = (demo.engines(MODEL, "fp32", "onnxruntime"), demo.assembly(MODEL, "fp32"), demo.weights(MODEL, "fp32"))
    model = Model.open(*paths, max_batch_size=2, max_seq_len=256, chunk_size=64)
    found = throughput.measure(model, requests=3, mean_prompt=8, mean_new=4, prefix=200, rounds=1)
    assert found["mixed"]["requests"] == 3 and set(found["mixed"]["seconds"]) == {
        "engine",
        "bare steps",
        "engine, sampled",
    }
    assert found["prefix"]["tokens"] == 128
    model = Model.open(*paths, max_batch_size=2, max_seq_len=256)
    assert throughput.measure(model, 3, 8, 4, prefix=200, rounds=1)["prefix"] is None
