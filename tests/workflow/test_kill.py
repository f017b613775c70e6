"""`kill -9` of a run with all its jobs, and a rerun: as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from checkout import Checkout


def test_killed_runs_end_in_the_results_of_an_undisturbed_one(finished: Checkout, fresh: Checkout) -> None:
    """Killed early, in the middle and late. Two clean runs that agree are part of it: `finished` is the other."""
    kept: dict[str, int] = {}
    for seconds in (4, 12, 25):
        kill_after(fresh, seconds)
        manifests = {str(path): path.stat().st_mtime_ns for path in fresh.results.rglob("*.json")}
        assert set(kept) <= set(manifests) or not kept, "a finished result was lost"
        kept = manifests
    fresh.finish()
    assert fresh.digests() == finished.digests()
    assert not [path for path in fresh.results.rglob("*") if path.name.endswith(".tmp")]
    assert not fresh.would_run()


def test_a_run_that_is_alive_keeps_others_out(fresh: Checkout) -> None:
    process = start(fresh)
    try:
        wait_for(lambda: list((fresh.folder / ".snakemake" / "locks").glob("*.lock")))
        second = fresh.snakemake("--cores", "1", check=False)
        assert second.returncode == 1 and "cannot be locked" in second.stderr
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def start(checkout: Checkout) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2"], cwd=checkout.folder, env=checkout.environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def kill_after(checkout: Checkout, seconds: float) -> None:
    process = start(checkout)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
