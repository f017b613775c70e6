"""The demo's lock in this repository pins what the demo makes now: fp32 here, all targets of this machine by .ci/demo.

A change that moves a graph, a golden token or a tolerance renews the lock in the same commit:
`make demo && .venv/bin/lockstep lock`.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from checkout import REPOSITORY, Checkout

LOCK = "locks/demo-llama.lock.json"
LOCKED = ("--config", "locked=true")


def results_of(lock: dict[str, Any], devices: set[str]) -> dict[str, Any]:
    """A lock without what made it, and with the engines of `devices` only."""
    locked = {name: items for name, items in lock["locked"].items() if device_of(name) in {None, *devices}}
    return {**{name: value for name, value in lock.items() if name != "made with"}, "locked": locked}


def device_of(place: str) -> str | None:
    """The device of a place of engines; None of another place."""
    kind, *names = place.split("/")
    return names[-1] if kind == "engines" else None


# Of the demo's precisions and backends, the run that tests share makes none of these.
NOT_MADE = {"fp16", "bf16", "w8a16", "w4a16", "cuda", "openvino"}


def devices_of(lock: dict[str, Any]) -> set[str]:
    return {device for name in lock["locked"] if (device := device_of(name)) is not None}


def test_the_demo_makes_what_is_locked(demo: Checkout) -> None:
    """With ONNX Runtime in fp32; its engines only on the architecture that is in the lock."""
    demo.call("lockstep", "lock")
    made_lock, committed = (json.loads((folder / LOCK).read_text()) for folder in (demo.folder, REPOSITORY))
    devices = devices_of(made_lock) & devices_of(committed)
    committed["locked"] = {
        name: items for name, items in committed["locked"].items() if not NOT_MADE & set(name.split("/"))
    }
    assert results_of(made_lock, devices) == results_of(committed, devices), "see this file's first lines"


def test_a_locked_run_and_verify_hold_on_this_cpu(demo: Checkout) -> None:
    (demo.folder / "locks").mkdir()
    shutil.copy(REPOSITORY / LOCK, demo.folder / LOCK)
    assert not demo.would_run(*LOCKED)
    assert "All 2 targets pass." in demo.call("lockstep", "summary", check=False).stdout
    *findings, _ = demo.call("lockstep", "verify", check=False).stdout.splitlines()
    assert findings and all(line.startswith("missing ") for line in findings), "of targets that are not in this config"
