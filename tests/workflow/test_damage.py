"""A byte flipped in any kind of artefact: `verify` names it, who reads it refuses, and making it again repairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout
from test_locks import flip

from some import some

MODEL = "demo-llama"
GRAPHS, ENGINES, REFERENCE = f"{MODEL}/fp16/graphs", f"{MODEL}/fp16/engines/onnxruntime", f"{MODEL}/reference"
FP16, FP32 = f"{MODEL}/fp16/2", f"{MODEL}/fp32/2"
# The stage that makes files (None: they are the user's); each file, with a stage that reads it and its target.
KINDS = {
    "resolve": {f"{MODEL}/checkpoint.json": ("convert", FP16), f"{MODEL}/architecture.json": ("export", FP16)},
    "convert": {f"{MODEL}/fp32/weights.json": ("golden", FP32), f"{MODEL}/fp32/weights.safetensors": ("golden", FP32)},
    "export": {
        f"{GRAPHS}/assembly.json": ("build", FP16),
        f"{GRAPHS}/middle.onnx": ("build", FP16),
        f"{GRAPHS}/tokenizer.json": ("golden", FP16),
    },
    "build": {f"{ENGINES}/engines.json": ("golden", FP16), f"{ENGINES}/middle.onnx": ("golden", FP16)},
    "reference": {f"{REFERENCE}/2.json": ("golden", FP16), f"{REFERENCE}/2.safetensors": ("golden", FP16)},
    None: {
        f"../resources/{MODEL}/model.safetensors": ("convert", FP16),
        f"../resources/{MODEL}/tokenizer.json": ("convert", FP16),
    },
}


@pytest.mark.parametrize("maker", some(KINDS, "export"), ids=[maker or "the user" for maker in KINDS])
def test_a_flipped_byte_is_named_refused_and_repaired(demo: Checkout, filled_cache: Path, maker: str | None) -> None:
    """Each file alone is named and refused; making all of them again once, or taking them from the cache, repairs
    all."""
    before, files = demo.digests(), KINDS[maker]
    for name, (reader, target) in files.items():
        flip(demo.results / name)
        found = demo.call("lockstep", "verify", check=False)
        assert found.returncode == 1 and f"different {name}: " in found.stdout
        process = demo.call("lockstep", "stage", reader, target, check=False)
        assert process.returncode in (1, 2) and Path(name).name in process.stderr, process.stderr
        assert len(process.stderr.splitlines()) == 1 and ("expected" in process.stderr or "made for" in process.stderr)
        flip(demo.results / name)
    if maker is not None:
        for name in files:
            flip(demo.results / name)
        # With torch they take long, and the bits of a reference hang on the number of threads.
        cached = {"LOCKSTEP_CACHE": str(filled_cache)} if maker in ("export", "reference") else {}
        Checkout(demo.folder, cached).call("lockstep", "stage", maker, next(target for _, target in files.values()))
    demo.call("lockstep", "verify")
    # A check that failed by hand has left its report, until it passes.
    assert {name: digest for name, digest in demo.digests().items() if not name.endswith(".failed.json")} == before


@pytest.mark.long
@pytest.mark.parametrize(
    "name, rule, precision",
    [(f"{ENGINES}/engines.json", "build", "fp16"), (f"{MODEL}/fp32/weights.safetensors", "convert", "fp32")],
)
def test_a_run_refuses_and_forcerun_repairs(demo: Checkout, name: str, rule: str, precision: str) -> None:
    before, target = demo.digests(), f"results/{MODEL}/{precision}/golden/onnxruntime/2.json"
    flip(demo.results / name)
    process = demo.snakemake("--cores", "2", "--forcerun", "golden", "--", target, check=False)
    assert (
        process.returncode == 1
        and "lockstep: error: " in process.stdout + process.stderr
        and Path(name).name in process.stdout + process.stderr
    )
    demo.finish("--forcerun", rule, "--", target)
    assert demo.digests() == before
    demo.call("lockstep", "verify")


def test_a_foreign_manifest_is_not_read(demo: Checkout) -> None:
    """Whole, sealed, and of other engines."""
    path = demo.results / ENGINES / "engines.json"
    path.write_bytes((demo.results / MODEL / "fp32" / "engines" / "onnxruntime" / "engines.json").read_bytes())
    process = demo.call("lockstep", "stage", "golden", FP16, check=False)
    assert (
        process.returncode == 2
        and (f"{ENGINES}/engines.json: expected sha256 ") in process.stderr
        and ("it was changed after it was made") in process.stderr
    )
