"""Triton's statistics extension: requests of each model, and their times."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from lockstep_serve.triton.models import VERSION

_DURATIONS = "success fail queue compute_input compute_infer compute_output cache_hit cache_miss".split()


class Statistics:
    """Counts of the requests of each model since the server began; nanoseconds."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._times: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._inferences: Counter[str] = Counter()
        self._last: dict[str, int] = {}  # milliseconds since 1970

    def succeeded(self, model: str, seconds: float, queued: float = 0.0, batch: int = 1) -> None:
        """Count an answered request; queued: of its `seconds`, those before its prompt was taken in."""
        self._inferences[model] += batch
        self._last[model] = time.time_ns() // 1_000_000
        times = {"success": seconds, "queue": queued, "compute_infer": seconds - queued}
        # perf_analyzer fails where these are not counted as often as the others.
        times |= {"compute_input": 0.0, "compute_output": 0.0}
        for name, value in times.items():
            self._add(model, name, value)

    def failed(self, model: str, seconds: float) -> None:
        """Count a request that was refused, cancelled, or ended with an error."""
        self._add(model, "fail", seconds)

    def _add(self, model: str, name: str, seconds: float) -> None:
        self._counts[model][name] += 1
        self._times[model][name] += max(0, round(seconds * 1e9))  # nanoseconds

    def of(self, models: Iterable[str]) -> dict[str, Any]:
        """Return Triton's statistics of models."""
        return {"model_stats": [self._of(model) for model in models]}

    def _of(self, model: str) -> dict[str, Any]:
        counts = self._counts[model]
        times = self._times[model]
        return {
            "name": model,
            "version": VERSION,
            "last_inference": self._last.get(model, 0),
            "inference_count": self._inferences[model],
            "execution_count": counts["success"],
            "inference_stats": {name: {"count": counts[name], "ns": times[name]} for name in _DURATIONS},
            "batch_stats": [],
        }
