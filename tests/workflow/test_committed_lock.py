"""The demo's lock in this repository pins what the demo makes now. A change that moves a graph, a golden
token or a tolerance renews the lock in the same commit: `make demo && .venv/bin/lockstep lock`."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkout import REPOSITORY, Checkout

from lockstep.backends.openvino import cpu as openvino
from lockstep.provenance.lock import Lock, entries_at
from shared import Shared
from some import some_cases

LOCK = "locks/demo-llama.lock.json"
LOCKED = ("--config", "locked=true")
SMALL = "demo-llama/w8a16"  # of the demo, the target with small weights that is checked against the lock in its own run
SMALL_GOLDEN = f"results/{SMALL}/golden/onnxruntime/2.json"


def results_of(lock: dict[str, Any], devices: set[str]) -> dict[str, Any]:
    """A lock without what made it, and with the engines of `devices` only."""
    locked = {name: items for name, items in lock["locked"].items() if device_of(name) in {None, *devices}}
    return {**{name: value for name, value in lock.items() if name != "made with"}, "locked": locked}


def device_of(place: str) -> str | None:
    """The device of a place of engines; None of another place."""
    kind, *names = place.split("/")
    return names[-1] if kind == "engines" else None


def without(lock: dict[str, Any], precisions: tuple[str, ...], backends: tuple[str, ...]) -> dict[str, Any]:
    """A lock without the targets in these precisions and those of these backends."""
    gone = {*precisions, *backends}
    return {
        **lock,
        "locked": {name: items for name, items in lock["locked"].items() if not gone & set(name.split("/"))},
    }


HAS_BF16 = openvino.why_not("bf16") is None
# What the demo has besides fp32 with ONNX Runtime: precisions, and backends that engines are built with.
OTHERS = {
    "w8a16": ("cuda", "onnxruntime"),
    "w4a16": ("openvino",),
    "bf16": ("openvino",) if HAS_BF16 else (),
    "fp16": ("onnxruntime", "cuda"),
}


# Of these, the run that tests share makes none.
NOT_MADE = (("fp16", "bf16", "w8a16", "w4a16"), ("cuda", "openvino"))


def devices_of(lock: dict[str, Any]) -> set[str]:
    return {device for name in lock["locked"] if (device := device_of(name)) is not None}


def test_the_demo_makes_what_is_locked(demo: Checkout) -> None:
    """With ONNX Runtime in fp32; its engines only on the architecture that is in the lock."""
    demo.call("lockstep", "lock")
    made_lock, committed = (json.loads((folder / LOCK).read_text()) for folder in (demo.folder, REPOSITORY))
    devices = devices_of(made_lock) & devices_of(committed)
    committed = without(committed, *NOT_MADE)
    assert results_of(made_lock, devices) == results_of(committed, devices), "see this file's first lines"


@pytest.mark.parametrize(
    "precision, backends",
    # The demo, in the same CI, makes those of CPUs.
    some_cases({name: (name, backends) for name, backends in OTHERS.items()}, "fp16", "w8a16"),
)
def test_other_precisions_and_backends_are_what_is_locked(
    demo: Checkout, precision: str, backends: tuple[str, ...]
) -> None:
    """Graphs, weights and engines; those are checked in the long test below."""
    demo.take_whole_demo()
    folder = demo.results / "demo-llama" / precision
    target = f"demo-llama/{precision}"
    manifests = [folder / "engines" / backend / "engines.json" for backend in backends]
    manifests += [folder / "weights.json", folder / "graphs" / "assembly.json"]
    for stage in ("export", "convert"):
        demo.job(stage, target)
    for backend in backends:
        demo.job("build", f"{target}/all/{backend}")
    lock = Lock.load(REPOSITORY / LOCK)
    results = list(itertools.chain(*map(entries_at, manifests)))
    assert len(results) == len(manifests)
    for entry in results:
        assert lock.entries.get(entry.where) == entry.items, entry.where


@pytest.mark.long
def test_the_whole_demo_makes_what_is_locked(demo: Checkout) -> None:
    demo.take_whole_demo()
    demo.finish()
    actual = demo.call("lockstep", "summary", check=False).stdout
    assert HAS_BF16 or "needs bf16 in the CPU" in actual
    assert "need an NVIDIA GPU" in actual or "All 14 targets pass." in actual
    (demo.folder / "locks").mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / LOCK, demo.folder / LOCK)
    assert not demo.would_run(*LOCKED)
    demo.call("lockstep", "verify")
    demo.call("lockstep", "lock")
    made_lock, committed = (json.loads((folder / LOCK).read_text()) for folder in (demo.folder, REPOSITORY))
    devices = devices_of(made_lock) & devices_of(committed)
    assert results_of(made_lock, devices) == results_of(committed, devices), "see this file's first lines"


def test_a_locked_run_and_verify_hold_on_this_cpu(demo: Checkout) -> None:
    (demo.folder / "locks").mkdir()
    shutil.copy(REPOSITORY / LOCK, demo.folder / LOCK)
    assert not demo.would_run(*LOCKED)
    assert "All 2 targets pass." in demo.call("lockstep", "summary", check=False).stdout
    *findings, _ = demo.call("lockstep", "verify", check=False).stdout.splitlines()
    assert findings and all(line.startswith("missing ") for line in findings), "of targets that are not in this config"


def cut_to_small(config: dict[str, Any]) -> None:
    """Leave one target of the demo's config: w8a16, two layers, ONNX Runtime."""
    model = config["models"]["demo-llama"]
    del model["backend_precisions"]
    model.update(precisions=["w8a16"], layers=[2], backends=["onnxruntime"])
    for prompt in model["golden"]["prompts"]:
        del prompt["expected"]["all"]


@pytest.fixture(scope="session")
def run_under_lock(first_run: Checkout, shared: Shared) -> Checkout:
    """One target with small weights, made under the committed lock by the run that its `log` shows. Only to be read, or
    copied."""

    def make(folder: Path) -> None:
        checkout = first_run.copy(folder / "checkout")
        checkout.take_whole_demo()
        checkout.edit_config(cut_to_small)
        (checkout.folder / "locks").mkdir()
        shutil.copy(REPOSITORY / LOCK, checkout.folder / LOCK)
        (folder / "log").write_text(checkout.finish(*LOCKED, "--", SMALL_GOLDEN))

    return Checkout(shared.folder("run_under_lock", make) / "checkout")


@pytest.mark.long
def test_a_locked_run_makes_small_weights_and_their_golden_tokens_as_locked(run_under_lock: Checkout) -> None:
    log = (run_under_lock.folder.parent / "log").read_text()
    rules = re.findall(r"^\[./5\] (\w+)", log, re.MULTILINE)
    assert sorted(rules) == ["build", "convert", "export", "golden", "quantized_reference"], log
    lock = Lock.load(run_under_lock.folder / LOCK)
    golden = [entry for entry in entries_at(run_under_lock.folder / SMALL_GOLDEN) if "golden" in entry.where]
    assert len(golden) == 2  # the tokens, and the terms of the check
    assert all(lock.entries[entry.where] == entry.items for entry in golden)
    assert not run_under_lock.would_run(SMALL_GOLDEN, *LOCKED)


@pytest.mark.long
def test_a_locked_run_refuses_another_golden_token_of_small_weights(run_under_lock: Checkout, tmp_path: Path) -> None:
    demo = run_under_lock.copy(tmp_path / "checkout")
    lock = json.loads((demo.folder / LOCK).read_text())
    tokens: dict[str, str] = lock["locked"]["golden/w8a16/onnxruntime/2"]
    first, *other_ids = tokens["Light"].split()
    tokens["Light"] = " ".join([str(int(first) + 1), *other_ids])
    (demo.folder / LOCK).write_text(json.dumps(lock))
    before = (demo.folder / SMALL_GOLDEN).read_bytes()
    process = demo.snakemake("--cores", "2", *LOCKED, "--forcerun", "golden", "--", SMALL_GOLDEN, check=False)
    errors = {line for line in process.stderr.splitlines() if line.startswith("lockstep: error: ")}
    assert process.returncode == 1 and len(errors) == 1
    assert errors.pop().startswith(f"lockstep: error: golden: Light differs: {tokens['Light']} -> {first} ")
    assert (demo.folder / SMALL_GOLDEN).read_bytes() == before, "refused before any job"
