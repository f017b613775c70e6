"""`kill -9` of a run with all its jobs, and a rerun: as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from checkout import Checkout

ONE_TARGET = ("results/demo-llama/fp32/golden/onnxruntime/2.json",)


@pytest.mark.long
@pytest.mark.parametrize(
    "start, stages, targets",
    [
        # Stages that load no torch, in a run that has all else.
        pytest.param("demo", ("convert", "build", "golden"), ONE_TARGET, id="one target"),
        # That two clean runs agree is part of it: `finished` is the other.
        pytest.param("fresh", ("convert", "export", "validate", "reference", "golden"), (), id="all"),
    ],
)
def test_killed_runs_end_in_the_results_of_an_undisturbed_one(
    finished: Checkout, request: pytest.FixtureRequest, start: str, stages: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    """Killed in one stage after the other."""
    checkout = request.getfixturevalue(start)
    for stage in stages:
        kill_in(checkout, stage, targets)
        for path in checkout.results.rglob("*.json"):
            assert path.name.startswith(".") or json.loads(path.read_bytes()), "a result is whole or not there"
    unlock(checkout)
    checkout.finish(*targets)
    digests = checkout.digests()
    expected = finished.digests()
    assert digests == {name: digest for name, digest in expected.items() if not targets or name in digests}
    assert all(target.removeprefix("results/") in digests for target in targets)
    assert not [path for path in checkout.results.rglob("*") if path.name.endswith(".tmp")]
    assert not checkout.would_run(*targets)
    checkout.call("lockstep", "verify")


@pytest.mark.long
def test_an_interrupted_run_ends_by_itself_and_goes_on_next_time(fresh: Checkout) -> None:
    """Ctrl-C reaches Snakemake and its jobs."""
    process = start(fresh)
    log = fresh.results / "logs" / "export"
    wait_for(lambda: any(path.is_file() for path in log.rglob("*.log")))
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) != 0
    assert not list((fresh.folder / ".snakemake" / "locks").glob("*.lock"))
    assert not [path for path in fresh.results.rglob("*") if path.name.endswith(".tmp")]
    assert "Traceback" not in "".join(path.read_text() for path in log.rglob("*.log"))
    assert fresh.would_run()["export"] >= 1


def test_checks_that_have_not_run_are_run_next_time(demo: Checkout) -> None:
    """As after a run that was stopped before them, or failed: its summary is there all the same."""
    for check in ("validate/all", "golden/onnxruntime/all", "served/onnxruntime/all"):
        (demo.results / "demo-llama" / "fp32" / f"{check}.json").unlink()
    demo.call("lockstep", "summary")
    assert {"validate", "golden", "served", "summary"} <= demo.would_run().keys()


def start(checkout: Checkout, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", *arguments], cwd=checkout.folder,
        env=checkout.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def kill_in(checkout: Checkout, stage: str, targets: tuple[str, ...]) -> None:
    """Kill a run that makes `stage` again, and all its jobs, shortly after the first job of `stage` has opened its
    log."""
    log = checkout.results / "logs" / stage
    shutil.rmtree(log, ignore_errors=True)
    unlock(checkout)
    process = start(checkout, "--forcerun", stage, "--", *targets)
    try:
        wait_for(lambda: process.poll() is not None or any(path.is_file() for path in log.rglob("*.log")))
        time.sleep(0.3)
        assert process.poll() is None, "the run ended before it was killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def unlock(checkout: Checkout) -> None:
    """As Snakemake's users do after a run that was killed."""
    checkout.snakemake("--unlock")


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
