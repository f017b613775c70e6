"""Time several contestants side by side: rounds in turn, the median of each, and ratios pair by pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from lockstep.backends.cpu import describe_cpu, thread_count

_PAUSE = 0.05  # seconds: thread pools stop spinning before the next contestant starts


def in_turn(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each contestant once a round, A B C A B C ..., after one round that does not count; each call gives its own
    seconds."""
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
    """How many times as fast as each other contestant `of` is, round by round: above 1, `of` is faster."""
    return {
        name: spread([a / b for a, b in zip(values, times[of], strict=True)], 3)
        for name, values in times.items()
        if name != of
    }


def surroundings(*packages: str, threads: int | None = None) -> dict[str, Any]:
    """What the numbers were measured on and with."""
    return {
        "cpu": describe_cpu(),
        "threads": thread_count(threads),
        "versions": {name: metadata.version(name) for name in sorted(packages)},
    }
