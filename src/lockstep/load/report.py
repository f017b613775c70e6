"""The result of a measurement: a document, a table, and a comparison of two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.artifacts.document import Document
from lockstep.artifacts.formats import LOAD
from lockstep.errors import InputError
from lockstep.load.figures import QUANTILES

_ROWS = (
    ("Requests/Sec", "requests_per_s", 2),
    ("OP tokens/sec", "output_tokens_per_s", 1),
    ("Avg. latency (ms)", "latency_mean_ms", 1),
    ("P99 latency (ms)", "latency_p99_ms", 1),
    ("P90 latency (ms)", "latency_p90_ms", 1),
    ("Avg. IP tokens per request", "input_tokens_mean", 1),
    ("Avg. OP tokens per request", "output_tokens_mean", 1),
    ("Total latency (ms)", "duration_s", 1),
    ("Total requests", "requests", 0),
    ("TTFT p50 (ms)", "ttft_p50_ms", 1),
    ("TTFT p99 (ms)", "ttft_p99_ms", 1),
    ("Inter-token latency p50 (ms)", "itl_p50_ms", 2),
    ("Inter-token latency p99 (ms)", "itl_p99_ms", 2),
    ("Time per output token, mean (ms)", "tpot_mean_ms", 2),
    ("Goodput (requests/s)", "goodput", 2),
    ("Send delay p99 (ms)", "send_delay_p99_ms", 2),
    ("Completed", "completed", 0),
    ("Cancelled", "cancelled", 0),
    ("Refused (429, 503)", "refused", 0),
    ("Failed", "failed", 0),
)
# What --check holds. The longest of all times is left out: one request decides it.
_LESS_IS_BETTER = (
    *(f"{name}_{which}_ms" for name in ("latency", "ttft", "tpot", "itl") for which in ("mean", *QUANTILES)),
    "refused",
    "failed",
)
_MORE_IS_BETTER = ("requests_per_s", "output_tokens_per_s", "goodput", "completed")


@dataclass(frozen=True)
class Run:
    """The figures of a run; rate: requests per second, None where all were sent at once."""

    rate: float | None
    figures: Mapping[str, float | None]


@dataclass(frozen=True)
class LoadReport(Document):
    """The runs of a measurement, one a rate; settings: what two reports must share to be compared."""

    FORMAT: ClassVar[str] = LOAD

    url: str
    model: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]


def name(rate: float | None) -> str:
    """Return the heading of a run."""
    return "all at once" if rate is None else f"{rate:g}/s"


def table(runs: Sequence[Run]) -> str:
    """Return the figures of all runs as text, a column each."""
    rows = [["", *(name(run.rate) for run in runs)]]
    for title, key, digits in _ROWS:
        values = [run.figures.get(key) for run in runs]
        if key == "goodput" and not any(key in run.figures for run in runs):
            continue
        scale = 1000 if key == "duration_s" else 1
        rows.append([title, *("-" if value is None else f"{scale * value:.{digits}f}" for value in values)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )


def worse(found: LoadReport, base: LoadReport, rtol: float) -> list[str]:
    """Return a line for each figure worse than in `base` by more than `rtol`, the worst first. Raises InputError."""
    if base.settings != found.settings:
        keys = sorted(base.settings.keys() | found.settings.keys())
        different = [key for key in keys if base.settings.get(key) != found.settings.get(key)]
        key = different[0]
        raise InputError(
            f"--check: expected the settings of the base, {key} {base.settings.get(key)!r}, found "
            f"{found.settings.get(key)!r}; measure with the same options, or make another base"
        )
    lines: list[tuple[float, str]] = []
    now = {run.rate: run.figures for run in found.runs}
    for run in base.runs:
        if run.rate not in now:
            raise InputError(f"--check: expected a run at {name(run.rate)}, as in the base, found none; add its --rate")
        for key, before in run.figures.items():
            if before is not None and key in (*_LESS_IS_BETTER, *_MORE_IS_BETTER):
                value = now[run.rate].get(key)
                by = _worse_by(key, before, value)
                if by > rtol:
                    said = "none" if value is None else f"{value:.4g}"
                    lines.append(
                        (by, f"{name(run.rate)}: {key}: expected {before:.4g} within {rtol:.0%}, found {said}")
                    )
    return [line for _, line in sorted(lines, key=lambda each: (-each[0], each[1]))]


def _worse_by(key: str, before: float, value: float | None) -> float:
    """Return by what share of `before` the figure is worse; negative for better."""
    if value is None:
        return math.inf
    change = value - before if key in _LESS_IS_BETTER else before - value
    if key == "failed" and change > 0:
        return math.inf
    if not before:
        return math.inf if change > 0 else 0.0
    return change / before
