"""Benchmarks: children are measured, contestants agree on a tiny shape, what is missing is said first."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import gpu, gpu_transformers, throughput
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


def test_a_childs_memory_and_time_are_its_own(tmp_path):
    usage = run_child([sys.executable, "-c", "block = b'x' * (300 << 20); sum(range(3_000_000))"], tmp_path / "log", 60)
    assert usage.reason is None
    assert usage.peak_mb > 300  # the block; the interpreter comes on top
    assert 0 < usage.cpu_seconds and 0 < usage.seconds < 60


@pytest.mark.long
def test_a_child_that_fails_or_hangs_says_so(tmp_path):
    assert (
        run_child([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log", 60).reason
        == "exit code 1: no such model"
    )
    usage = run_child([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 1)
    assert usage.reason == "not done after 1 s" and usage.seconds < 30


@pytest.mark.parametrize("command", ["gpu", "batches", "ranks"])
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


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
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


@pytest.mark.long
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
from lockstep.stages import worker
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


@pytest.mark.long  # its parts are looked at above and in test_bench_ranks.py
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
    assert made["engine_bytes"] and made["cold_seconds"] > 0 and record["ready_seconds"] > 0
    assert set(record["decode"]) == {"1", "16"} and record["prefill"]["tokens"] == 40
    assert {"block", "gaps"} < set(record["prefill"]["microseconds"])
    assert record["transformers"]["torch"]
    # All tokens go through the first two layers and to the third one's queries, keys and values; one row through the
    # rest of it and lm_head.
    qkv, rest, head = 64 * (64 + 2 * 32), 64 * 64 + 3 * 64 * 96, 64 * 256
    seen = 4 * (16 + 16) * 3 * sum(range(1, 11))  # heads, the two products of a layer, layers, tokens
    assert gpu.operations(Assembly.load(work / "graphs" / "assembly.json"), 10) == (
        2 * 10 * (3 * qkv + 2 * rest),
        2 * seen + 2 * (rest + head),
    )


@pytest.mark.long
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
