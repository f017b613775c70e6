"""The demo's lock in this repository: what the demo makes now is what is locked. A change that moves a graph, a golden
token or a tolerance renews the lock in the same commit: `make demo && .venv/bin/lockstep lock`."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from checkout import REPOSITORY, Checkout

from lockstep.backends.openvino import cpu as openvino
from lockstep.provenance.lock import Lock
from lockstep.provenance.lockfile import sections_at

LOCK = "locks/demo-llama.lock.json"


def results_of(lock: dict[str, Any], devices: set[str]) -> dict[str, Any]:
    """A lock without what made it, and with the engines of `devices` only."""
    kept = json.loads(json.dumps({name: value for name, value in lock.items() if name != "made with"}))
    for parts in kept["precisions"].values():
        for engines in parts["engines"].values():
            for device in engines.keys() - devices:
                del engines[device]
    return kept


def without(lock: dict[str, Any], precisions: tuple[str, ...], backends: tuple[str, ...]) -> dict[str, Any]:
    """A lock without the targets in these precisions and those of these backends."""
    kept = json.loads(json.dumps(lock))
    for precision in precisions:
        kept["precisions"].pop(precision, None)
    for parts in kept["precisions"].values():
        for kind in ("engines", "golden"):
            for backend in backends:
                parts.get(kind, {}).pop(backend, None)
            if not parts.get(kind):
                parts.pop(kind, None)
    starts, ends = tuple(f"{each}/" for each in precisions), tuple(f"/{each}" for each in backends)
    gone = lambda name: name.startswith(starts) or name.endswith(ends)
    checks = {
        stage: {name: of for name, of in terms.items() if not gone(name)} for stage, terms in kept["checks"].items()
    }
    return {**kept, "checks": {stage: terms for stage, terms in checks.items() if terms}}


HAS_BF16 = openvino.why_not("bf16") is None
# What the demo has beside fp32 and fp16 with ONNX Runtime: precisions, and backends that engines are built with.
OTHERS = {
    "w8a16": ("onnxruntime",),
    "w4a16": ("openvino",),
    "bf16": ("tensorrt_rtx", *(["openvino"] if HAS_BF16 else [])),
    "fp16": ("tensorrt_rtx",),
}


# Of these, the run that tests share makes none.
NOT_MADE = (("bf16", "w8a16", "w4a16"), ("openvino", "tensorrt_rtx"))


def devices_of(lock: dict[str, Any]) -> set[str]:
    return {
        device for parts in lock["precisions"].values() for engines in parts["engines"].values() for device in engines
    }


def test_the_demo_makes_what_is_locked(demo: Checkout) -> None:
    """With ONNX Runtime in fp32 and fp16; its engines only where this CPU is in the lock, for their bytes depend on its
    instruction sets."""
    demo.call("lockstep", "lock")
    made, committed = (json.loads((folder / LOCK).read_text()) for folder in (demo.folder, REPOSITORY))
    devices = devices_of(made) & devices_of(committed)
    committed = without(committed, *NOT_MADE)
    assert results_of(made, devices) == results_of(committed, devices), "see this file's first lines"


@pytest.mark.parametrize("precision, backends", OTHERS.items(), ids=OTHERS)
def test_other_precisions_and_backends_are_what_is_locked(
    demo: Checkout, precision: str, backends: tuple[str, ...]
) -> None:
    """Graphs, weights and engines; those are checked in the long test below."""
    demo.take_whole_demo()
    folder, target = demo.results / "demo-llama" / precision, f"demo-llama/{precision}"
    asked = [folder / "engines" / backend / "engines.json" for backend in backends]
    if precision != "fp16":  # which is there
        asked += [folder / "weights.json", folder / "graphs" / "assembly.json"]
        for stage in ("export", "convert"):
            demo.call("lockstep", stage, target)
    for backend in backends:
        demo.call("lockstep", "build", f"{target}/all/{backend}")
    lock = Lock.load(REPOSITORY / LOCK)
    found = [section for path in asked for section in sections_at(path)]
    assert len(found) == len(asked)
    for section in found:
        locked = lock.section(section.where)
        if section.stage == "build" and not locked:  # of another CPU
            locked = next(iter((lock.devices(precision, section.where[3]) or {}).values()))
            assert locked.keys() == section.items.keys()
        else:
            assert locked == section.items, section.where


@pytest.mark.long
def test_the_whole_demo_makes_what_is_locked(demo: Checkout) -> None:
    demo.take_whole_demo()
    demo.finish()
    found = demo.call("lockstep", "summary", check=False).stdout
    assert HAS_BF16 or "no bf16" in found
    assert "not run" in found and "no GPU of compute capability" in found or "All 14 targets pass." in found
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
    kept = devices_of(without(json.loads((REPOSITORY / LOCK).read_text()), *NOT_MADE))
    assert kept <= devices_of(json.loads((demo.folder / LOCK).read_text()))
    assert not demo.would_run("--config", "locked=true")
    found = demo.call("lockstep", "summary", check=False).stdout
    assert "All 4 targets pass." in found
    demo.call("lockstep", "verify")
