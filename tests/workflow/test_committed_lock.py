"""The demo's lock in this repository: what the demo makes now is what is locked. A change that moves a graph, a golden
token or a tolerance renews the lock in the same commit: `make demo && .venv/bin/lockstep lock`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkout import REPOSITORY, Checkout

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


def devices_of(lock: dict[str, Any]) -> set[str]:
    return {
        device for parts in lock["precisions"].values() for engines in parts["engines"].values() for device in engines
    }


@pytest.fixture
def demo(first_run: Checkout, shared: Shared, tmp_path: Path) -> Checkout:
    """A copy of the finished run with the targets of TensorRT-RTX."""

    def make(folder: Path) -> None:
        checkout = first_run.copy(folder / "checkout")
        checkout.take_whole_demo()
        checkout.finish()

    return Checkout(shared.folder("whole_demo", make) / "checkout").copy(tmp_path / "checkout")


def test_the_demo_makes_what_is_locked(demo: Checkout) -> None:
    """Engines of ONNX Runtime only where this CPU is in the lock, for their bytes depend on its instruction sets; those
    of TensorRT-RTX always."""
    demo.call("lockstep", "lock")
    made, committed = (json.loads((folder / LOCK).read_text()) for folder in (demo.folder, REPOSITORY))
    devices = devices_of(made) & devices_of(committed)
    assert any("RTX" in device for device in devices)
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
