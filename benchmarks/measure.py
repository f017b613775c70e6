"""What all benchmarks share: timing in turn, the machine, JSON and digests.

Contestants take rounds in turn; of each the median is given, and ratios pair by pair. JSON and digests are the
package's, so that a manifest made here has its digest as one of the package.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lockstep
from lockstep.artifacts.files import dump_json, read_json, write_json
from lockstep.backends.cpu import THREADS_VARIABLE, thread_count

__all__ = [
    "THREADS_VARIABLE",
    "by_size",
    "deliver",
    "dump_json",
    "in_turn",
    "ratios",
    "read_json",
    "recorder",
    "spread",
    "surroundings",
    "thread_count",
    "write_json",
]

_PAUSE = 0.05  # seconds: thread pools stop spinning before the next contestant starts


def in_turn(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each contestant once a round, A B C A B C ..., and return their seconds.

    One round before does not count. Each call gives its own seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            time.sleep(_PAUSE)
            seconds = run()
            if number:
                times[name].append(seconds)
    return times


def spread(values: Sequence[float], digits: int = 6) -> dict[str, float]:
    """{"min", "median", "max"} of some values."""
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


def ratios(times: Mapping[str, Sequence[float]], of: str) -> dict[str, dict[str, float]]:
    """Return how many times as fast as each other contestant `of` is, round by round. Above 1, `of` is faster."""
    speeds = {}
    for name, values in times.items():
        if name != of:
            speeds[name] = spread([a / b for a, b in zip(values, times[of], strict=True)], 3)
    return speeds


def recorder(out: Path, record: dict[str, Any]) -> Callable[..., None]:
    """Return what adds parts to a record and writes it, so that a run that is cut short has the parts before."""
    began = time.perf_counter()

    def note(**parts: Any) -> None:
        record.update(parts)
        write_json(out, record)
        print(f"bench: {time.perf_counter() - began:.0f} s: {', '.join(parts)}", file=sys.stderr, flush=True)

    return note


def by_size(rows: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the items in the order of their numbers: keys of JSON are sorted as text."""
    return sorted(rows.items(), key=lambda row: int(row[0]))


def deliver(record: Mapping[str, Any], write: Path | None) -> None:
    """Print the record, or write it to bench/NAME.json in the folder `write` and print where it is."""
    if write is None:
        print(dump_json(record), end="")
        return
    path = write / "bench" / f"{record['benchmark']}.json"
    write_json(path, record)
    print(path)


def surroundings(*packages: str, threads: int | None = None) -> dict[str, Any]:
    """Return what the numbers were measured on and with."""
    return {
        "cpu": lockstep.describe_cpu(),
        "threads": thread_count(threads),
        "versions": {name: metadata.version(name) for name in sorted(packages)},
    }
