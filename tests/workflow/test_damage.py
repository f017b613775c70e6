"""A byte flipped in any kind of artefact: `verify` names it, who reads it refuses, and making it again repairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout
from test_locks import flip

from some import some

MODEL = "demo-llama"
GRAPHS = f"{MODEL}/fp32/graphs"
ENGINES = f"{MODEL}/fp32/engines/onnxruntime"
REFERENCE = f"{MODEL}/reference"
TARGET = f"{MODEL}/fp32/2"
# The stage that makes files (None: they are the user's); each file, with a stage that reads it and its target.
KINDS = {
    "resolve": {f"{MODEL}/checkpoint.json": ("convert", TARGET), f"{MODEL}/architecture.json": ("export", TARGET)},
    "convert": {
        f"{MODEL}/fp32/weights.json": ("golden", TARGET),
        f"{MODEL}/fp32/weights.safetensors": ("golden", TARGET),
    },
    "export": {
        f"{GRAPHS}/assembly.json": ("build", TARGET),
        f"{GRAPHS}/middle.onnx": ("build", TARGET),
        f"{GRAPHS}/tokenizer.json": ("golden", TARGET),
    },
    "build": {f"{ENGINES}/engines.json": ("golden", TARGET), f"{ENGINES}/middle.onnx": ("golden", TARGET)},
    "reference": {f"{REFERENCE}/2.json": ("golden", TARGET), f"{REFERENCE}/2.safetensors": ("golden", TARGET)},
    None: {
        f"../resources/{MODEL}/model.safetensors": ("convert", TARGET),
        f"../resources/{MODEL}/tokenizer.json": ("convert", TARGET),
    },
}


@pytest.mark.parametrize("maker", some(KINDS, "export"), ids=[maker or "the user" for maker in KINDS])
def test_a_flipped_byte_is_named_refused_and_repaired(demo: Checkout, filled_cache: Path, maker: str | None) -> None:
    """Each file alone is named and refused; making all of them again once, or taking them from the cache, repairs
    all."""
    before = demo.digests()
    files = KINDS[maker]
    for name, (reader, target) in files.items():
        flip(demo.results / name)
        actual = demo.call("lockstep", "verify", check=False)
        assert actual.returncode == 1 and f"different {name}: " in actual.stdout
        process = demo.job(reader, target, check=False)
        assert process.returncode in (1, 2) and Path(name).name in process.stderr, process.stderr
        assert len(process.stderr.splitlines()) == 1 and ("expected" in process.stderr or "made for" in process.stderr)
        flip(demo.results / name)
    if maker is not None:
        for name in files:
            flip(demo.results / name)
        # With torch they take long, and the bits of a reference hang on the number of threads.
        cached = {"LOCKSTEP_CACHE": str(filled_cache)} if maker in ("export", "reference") else {}
        Checkout(demo.folder, cached).job(maker, next(target for _, target in files.values()))
    demo.call("lockstep", "verify")
    # A check that failed has left its report, until it passes.
    assert {name: digest for name, digest in demo.digests().items() if not name.endswith(".failed.json")} == before
