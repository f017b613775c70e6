"""A byte flipped in any kind of artefact: `verify` names it, who reads it refuses, and making it again repairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout
from test_locks import flip

MODEL = "demo-llama"
GRAPHS, ENGINES, REFERENCE = f"{MODEL}/fp16/graphs", f"{MODEL}/fp16/engines/onnxruntime", f"{MODEL}/reference"
FP16, FP32 = f"{MODEL}/fp16/2", f"{MODEL}/fp32/2"
# File: the stage that reads it and its target, the stage that makes it (None: a file of the user's).
KINDS = {
    f"{MODEL}/checkpoint.json": ("convert", FP16, "resolve"),
    f"{MODEL}/architecture.json": ("export", FP16, "resolve"),
    f"{MODEL}/fp32/weights.json": ("golden", FP32, "convert"),
    f"{MODEL}/fp32/weights.safetensors": ("golden", FP32, "convert"),
    f"{GRAPHS}/assembly.json": ("build", FP16, "export"),
    f"{GRAPHS}/middle.onnx": ("build", FP16, "export"),
    f"{GRAPHS}/tokenizer.json": ("golden", FP16, "export"),
    f"{ENGINES}/engines.json": ("golden", FP16, "build"),
    f"{ENGINES}/middle.onnx": ("golden", FP16, "build"),
    f"{REFERENCE}/2.json": ("golden", FP16, "reference"),
    f"{REFERENCE}/2.safetensors": ("golden", FP16, "reference"),
    f"../resources/{MODEL}/model.safetensors": ("convert", FP16, None),
    f"../resources/{MODEL}/tokenizer.json": ("convert", FP16, None),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_byte_is_named_refused_and_repaired(demo: Checkout, name: str) -> None:
    reader, target, maker = KINDS[name]
    before = demo.digests()
    flip(demo.results / name)
    found = demo.run("lockstep", "verify", check=False)
    assert found.returncode == 1 and f"different {name}: " in found.stdout
    process = demo.run("lockstep", reader, target, check=False)
    assert process.returncode in (1, 2) and Path(name).name in process.stderr, process.stderr
    assert len(process.stderr.splitlines()) == 1 and ("expected" in process.stderr or "made for" in process.stderr)
    if maker is None:
        flip(demo.results / name)
    elif maker == "reference":  # its logits hang on the number of threads, which the rule sets
        demo.snakemake("--cores", "2", "--forcerun", maker, f"results/{REFERENCE}/2.json")
    else:
        demo.run("lockstep", maker, target)
    demo.run("lockstep", "verify")
    assert demo.digests() == before


@pytest.mark.parametrize("name, rule", [(f"{ENGINES}/engines.json", "build"), (f"{MODEL}/fp32/weights.safetensors", "convert")])
def test_a_run_refuses_and_forcerun_repairs(demo: Checkout, name: str, rule: str) -> None:
    before = demo.digests()
    flip(demo.results / name)
    process = demo.snakemake("--cores", "2", "--forcerun", "golden", check=False)
    assert process.returncode == 1 and "lockstep: error: " in process.stdout + process.stderr and Path(name).name in process.stdout + process.stderr
    demo.finish("--forcerun", rule)
    assert demo.digests() == before
    demo.run("lockstep", "verify")


def test_a_foreign_manifest_is_not_read(demo: Checkout) -> None:
    """Whole, sealed, and of other engines."""
    path = demo.results / ENGINES / "engines.json"
    path.write_bytes((demo.results / MODEL / "fp32" / "engines" / "onnxruntime" / "engines.json").read_bytes())
    process = demo.run("lockstep", "golden", FP16, check=False)
    assert process.returncode == 2 and f"{ENGINES}/engines.json: expected sha256 " in process.stderr and "it was changed after it was made" in process.stderr
