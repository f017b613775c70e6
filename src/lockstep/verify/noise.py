"""The noise of logits in a precision, and the bounds of errors that follow from it. Needs no torch.

In: the errors of transformers in fp16 on the same weights and tokens (`verify.rounded`): its noise. Out: the largest
allowed error of each row. The rms of logits is that of the median row: on a trained model single rows are so sensitive
that they would outweigh all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.onnx_tools.judge import Spread
from lockstep.tolerances import RMS, TAIL, THROWN_OFF, Tolerances


class LogitNoise:
    """The noise in fp16 of one request's logits. rows: {number of tokens: (largest, rms) error}."""

    def __init__(self, rows: Mapping[int, tuple[float, float]]):
        self._rows = {count: Spread(*map(float, row)) for count, row in rows.items()}
        errors = [row.largest for row in self._rows.values()] or [0.0]
        self._usual = float(np.median(errors))
        self.largest = max(errors)

    def rms(self, counts: Iterable[int]) -> float:
        """Return the rms of the median of these rows, or of all rows where that is larger.

        Up to `TAIL` times that where a row is an outlier: later rows read its keys and values in the KV cache, and are
        all off where other rounding makes it a larger one (an engine on a GPU: by 2.6 times).
        """
        every = [row.rms for row in self._rows.values()]
        rms_values = [self._rows[count].rms for count in counts if count in self._rows] or every
        usual = max(float(np.median(rms_values)), float(np.median(every)))
        return max(usual, min(max(every) / THROWN_OFF, TAIL * usual))

    def at(self, count: int) -> float:
        """Return the largest error to expect of a row.

        Its own noise, or that of other rows where it is larger, up to `TAIL` times the usual row: on a trained model a
        row that one way of rounding leaves undisturbed another may disturb (an engine on a GPU was off by 12 times).
        For a row without noise the largest of all.
        """
        if count not in self._rows:
            return self.largest
        return max(self._rows[count].largest, min(self.largest, TAIL * self._usual))


@dataclass(frozen=True)
class LogitBounds:
    noise: LogitNoise
    tolerances: Tolerances

    @property
    def cost(self) -> float:
        """Return the largest error of a logit in this precision: its noise, times the units of this rounding."""
        return self.tolerances.rounding * self.noise.largest

    @property
    def largest(self) -> float:
        return self._allowed(self.cost)

    def cost_at(self, count: int) -> float:
        return self.tolerances.rounding * self.noise.at(count)

    def at(self, count: int) -> float:
        return self._allowed(self.cost_at(count))

    def _allowed(self, cost: float) -> float:
        if self.tolerances.logits is not None:  # the user's bound
            return self.tolerances.logits
        return self.tolerances.noise * cost

    def rms(self, counts: Iterable[int]) -> float:
        if self.tolerances.logits is not None:  # the user's bound is of single logits
            return math.inf
        return RMS * self.tolerances.noise * self.tolerances.rounding * self.noise.rms(counts)
