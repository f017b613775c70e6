"""The demo's lock in this repository: what the demo makes now is what is locked. A change that moves a graph, a golden
token or a tolerance renews the lock in the same commit: `make demo && .venv/bin/lockstep lock`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkout import REPOSITORY, Checkout

from lockstep.backends.openvino import cpu as openvino
from lockstep.provenance.locked import expected_items
from lockstep.provenance.lockfile import read_lock, sections_at
from shared import Shared

LOCK = "locks/demo-llama.lock.json"


def results_of(lock: dict[str, Any], devices: set[str]) -> dict[str, Any]:
    """A lock without what made it, and with the engines of `devices` only."""
    kept = json.loads(json.dumps({name: value for name, value in lock.items() if name != "made with"}))
    for parts in kept["precisions"].values():
        for engines in parts["engines"].values():
            for device in engines.keys() - devices:
                del engines[device]
    return kept


def without_small_weights(lock: dict[str, Any], *backends: str) -> dict[str, Any]:
    """A lock without the targets in quantised weights and those of `backends`."""
    kept = json.loads(json.dumps(lock))
    for precision in ("w8a16", "w4a16"):
        kept["precisions"].pop(precision, None)
    for parts in kept["precisions"].values():
        for kind in ("engines", "golden"):
            for backend in backends:
                parts.get(kind, {}).pop(backend, None)
            if not parts.get(kind):
                parts.pop(kind, None)
    gone = lambda name: name.startswith(("w8a16/", "w4a16/")) or name.endswith(tuple(f"/{each}" for each in backends))
    checks = {
        stage: {name: of for name, of in terms.items() if not gone(name)} for stage, terms in kept["checks"].items()
    }
    return {**kept, "checks": {stage: terms for stage, terms in checks.items() if terms}}


HAS_BF16 = openvino.why_not("bf16") is None


def devices_of(lock: dict[str, Any]) -> set[str]:
    return {
        device for parts in lock["precisions"].values() for engines in parts["engines"].values() for device in engines
    }


@pytest.fixture
def demo(first_run: Checkout, shared: Shared, tmp_path: Path) -> Checkout:
    """A copy of the finished run with the targets of TensorRT-RTX."""

    def make(folder: Path) -> None:
        checkout = first_run.copy(folder / "checkout")
        checkout.take_demo("tensorrt_rtx")
        checkout.finish()

    return Checkout(shared.folder("whole_demo", make) / "checkout").copy(tmp_path / "checkout")


def test_the_demo_makes_what_is_locked(demo: Checkout) -> None:
    """Engines of ONNX Runtime only where this CPU is in the lock, for their bytes depend on its instruction sets; those
    of TensorRT-RTX always."""
    demo.call("lockstep", "lock")
    made, committed = (json.loads((folder / LOCK).read_text()) for folder in (demo.folder, REPOSITORY))
    devices = devices_of(made) & devices_of(committed)
    assert any("RTX" in device for device in devices)
    committed = without_small_weights(committed, "openvino")
    assert results_of(made, devices) == results_of(committed, devices), "see this file's first lines"


def test_small_weights_and_openvino_are_what_is_locked(demo: Checkout) -> None:
    """Graphs, weights and engines; those are checked in the long test below."""
    demo.take_whole_demo()
    names = ["w8a16/engines/onnxruntime", "w4a16/engines/openvino"]
    names += ["bf16/engines/openvino"] if HAS_BF16 else []
    asked = [f"results/demo-llama/{name}/engines.json" for name in names]
    asked += [f"results/demo-llama/{precision}/weights.json" for precision in ("w8a16", "w4a16")]
    demo.finish(*asked)
    lock = read_lock(REPOSITORY / LOCK)
    found = [section for path in map(demo.folder.joinpath, asked) for section in sections_at(path)]
    assemblies = [demo.results / "demo-llama" / name / "graphs" / "assembly.json" for name in ("w8a16", "w4a16")]
    found += [section for path in assemblies for section in sections_at(path)]
    assert len(found) == len(asked) + 2
    for section in found:
        locked = expected_items(lock, section.where)
        if section.stage == "build" and not locked:  # of another CPU
            locked = next(iter((expected_items(lock, section.where[:-1]) or {}).values()))
            assert locked.keys() == section.items.keys()
        else:
            assert locked == section.items, section.where


@pytest.mark.long
def test_the_whole_demo_makes_what_is_locked(demo: Checkout) -> None:
    demo.take_whole_demo()
    demo.finish()
    found = demo.call("lockstep", "summary", check=False).stdout
    assert HAS_BF16 or "no bf16" in found
    (demo.folder / "locks").mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / LOCK, demo.folder / LOCK)
    assert not demo.would_run("--config", "locked=true")
    demo.call("lockstep", "lock")
    made, committed = (json.loads((folder / LOCK).read_text()) for folder in (demo.folder, REPOSITORY))
    devices = devices_of(made) & devices_of(committed)
    assert results_of(made, devices) == results_of(committed, devices), "see this file's first lines"


def test_a_locked_run_holds_with_this_device_added(demo: Checkout) -> None:
    (demo.folder / "locks").mkdir()
    shutil.copy(REPOSITORY / LOCK, demo.folder / LOCK)
    demo.call("lockstep", "lock")  # adds the engines of this CPU, and keeps those of others
    kept = devices_of(json.loads((REPOSITORY / LOCK).read_text()))
    assert kept <= devices_of(json.loads((demo.folder / LOCK).read_text()))
    assert not demo.would_run("--config", "locked=true")
    found = demo.call("lockstep", "summary", check=False).stdout
    assert "not run" in found and "no GPU of compute capability" in found or "All 8 targets pass." in found
    demo.call("lockstep", "verify")
