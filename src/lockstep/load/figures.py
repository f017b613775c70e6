"""The figures of a measurement: throughput, latencies, goodput, from records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.errors import InputError
from lockstep.load.records import CANCELLED, COMPLETED, FAILED, REFUSED, Record

Figures = dict[str, float | None]
# Of which times there are distributions, in milliseconds. All but the gaps and tpot count from the scheduled send.
TIMES = ("latency", "ttft", "tpot", "itl", "send_delay")
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
_GOALS = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}  # as vLLM names them


def goals(text: str) -> dict[str, float]:
    """Return the limits of `--goodput` (`ttft:500,tpot:30`, in ms) by name, in seconds. Raises InputError."""
    found = {}
    for part in filter(None, re.split(r"[,\s]+", text)):
        name, _, limit = part.partition(":")
        if name not in _GOALS or not re.fullmatch(r"\d+(\.\d+)?", limit):
            raise InputError(
                f"--goodput: expected NAME:MILLISECONDS, such as ttft:500,tpot:30, with names of "
                f"{', '.join(_GOALS)}, found {part!r}"
            )
        found[name] = float(limit) / 1000
    return found


def figures(records: Sequence[Record], limits: Mapping[str, float] | None = None) -> Figures:
    """Return the figures of a run.

    Rates are over its duration, from the first scheduled send to the last end. Times and tokens are of the requests
    that were completed; None where there are none. Of `itl`, the gaps between pieces of text, all of all requests count
    alike; `tpot` is one number a request.
    limits: of `goals`; `goodput` is then how many requests a second kept all of them.
    """
    completed = [record for record in records if record.status == COMPLETED]
    ends = [record.end for record in records if record.end is not None]
    duration = max(ends, default=0.0) - min((record.scheduled for record in records), default=0.0)
    found: Figures = {"requests": len(records), "duration_s": duration}
    for status in (COMPLETED, CANCELLED, REFUSED, FAILED):
        found[status] = sum(record.status == status for record in records)
    outputs = [record.output_tokens or 0 for record in completed]
    found["requests_per_s"] = len(completed) / duration if duration else None
    found["output_tokens_per_s"] = sum(outputs) / duration if duration else None
    found["input_tokens_mean"] = _mean([record.input_tokens or 0 for record in completed])
    found["output_tokens_mean"] = _mean(outputs)
    pieces = sum(len(record.chunks) for record in completed)
    found["tokens_per_chunk"] = sum(outputs) / pieces if pieces else None
    for name, values in _times(records, completed).items():
        milliseconds = [1000 * value for value in values]
        found[f"{name}_mean_ms"] = _mean(milliseconds)
        for quantile, percent in QUANTILES.items():
            found[f"{name}_{quantile}_ms"] = float(np.percentile(milliseconds, percent)) if milliseconds else None
        found[f"{name}_max_ms"] = max(milliseconds, default=None)
    if limits:
        good = sum(all(_keeps(record, name, limit) for name, limit in limits.items()) for record in completed)
        found["goodput"] = good / duration if duration else None
    return found


def _times(records: Sequence[Record], completed: Sequence[Record]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {
        name: [value for record in completed if (value := getattr(record, name)) is not None]
        for name in ("latency", "ttft", "tpot")
    }
    found["itl"] = [gap for record in completed for gap in record.gaps]
    found["send_delay"] = [record.sent - record.scheduled for record in records if record.sent is not None]
    assert set(found) == set(TIMES)
    return found


def _keeps(record: Record, name: str, limit: float) -> bool:
    """Return whether a request keeps a limit, in seconds; one of one token keeps any limit of tpot."""
    value = getattr(record, _GOALS[name])
    return name == "tpot" if value is None else value <= limit


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
