"""Calls that only look at a run: whatever is damaged there, they change nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from checkout import Checkout
from test_kill import start, wait_for
from test_locks import flip

from lockstep.artifacts.files import sha256_file, write_json
from lockstep.manifests.manifest_files import failed_path

MODEL = "demo-llama"
FP32 = f"{MODEL}/fp32"
# Snakemake's own notes of each call, dry runs too.
NOTES = (".snakemake/log/", ".snakemake/iocache/")


def in_the_future(path: Path) -> None:
    os.utime(path, (time.time() + 3600,) * 2)


# Kind of damage: its change of the results, and the rules that a run makes again for it.
DAMAGES = {
    "lost engine": lambda results: (results / FP32 / "engines/onnxruntime/middle.onnx").unlink(),
    "truncated weights": lambda results: os.truncate(results / FP32 / "weights.safetensors", 1000),
    "lost graph": lambda results: (results / FP32 / "graphs/middle.onnx").unlink(),
    "lost statement": lambda results: (results / FP32 / "validate/2.statement.json").unlink(),
    "lost statement of the first": lambda results: (results / MODEL / "checkpoint.statement.json").unlink(),
    "lost manifest": lambda results: (results / FP32 / "golden/onnxruntime/2.json").unlink(),
    "from the future": lambda results: in_the_future(results / FP32 / "graphs/assembly.json"),
    "flipped byte": lambda results: flip(results / FP32 / "engines/onnxruntime/entry.onnx"),
    "failed since": lambda results: write_json(
        failed_path(results / FP32 / "golden/onnxruntime/all.json"),
        {"format": "lockstep.failure/1", "failure": "planted"},
    ),
}
SNAKEMAKE = (
    ("--dry-run",), ("--dry-run", "--config", "locked=true"), ("--lint",), ("--summary",), ("--detailed-summary",),
    ("--list-rules",), ("--dag",), ("--list-params-changes",), ("--touch", "--dry-run"), ("--report", "../report.html"),
)  # fmt: skip
LOCKSTEP = (
    ("verify", "--deep"), ("explain", f"{FP32}/all"), ("summary",), ("targets",),
)  # fmt: skip


def state(folder: Path) -> dict[str, tuple]:
    """Kind, digest or target, and time of everything below `folder`."""
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        about = path.lstat()
        if not name.startswith(NOTES) and not path.is_dir():
            files[name] = (about.st_mode, about.st_mtime_ns, sha256_file(path) if path.is_file() else os.readlink(path))
        elif path.is_dir() and name.startswith("results"):
            files[name] = (about.st_mode, about.st_mtime_ns)
    return files


@pytest.fixture
def damaged(demo: Checkout) -> Checkout:
    """A locked run with all kinds of damage, and the lock of a run that was killed."""
    demo.call("lockstep", "lock")
    process = start(demo, "--forcerun", "summary", "results/summary.json")
    wait_for(lambda: list((demo.folder / ".snakemake/locks").glob("*.lock")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list((demo.folder / ".snakemake/locks").glob("*.lock"))
    for damage in DAMAGES.values():
        damage(demo.results)
    return demo


@pytest.mark.long
def test_looking_changes_nothing(damaged: Checkout) -> None:
    before = state(damaged.folder)
    for module, calls in (("snakemake", SNAKEMAKE), ("lockstep", LOCKSTEP)):
        for arguments in calls:
            process = damaged.call(module, *arguments, check=False)
            assert state(damaged.folder) == before, (module, arguments)
            assert "Traceback" not in process.stderr, (arguments, process.stderr)
