"""The noise of logits in a precision, and the bounds of errors that follow from it. Needs no torch.

In: errors that transformers makes in fp16 on the same weights and tokens (`verify.rounded`), its noise. Out: the errors
that pass of each row. Of logits the rms is that of the median row: on a trained model single rows are so sensitive that
they would outweigh all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.onnx_tools.judge import RMS, Spread
from lockstep.tolerances import Tolerances

_TAIL = 3  # see `LogitNoise.at` and `rms`
_THROWN_OFF = 16  # times the rms of the usual row; 2 to 9 times is seen where no token is thrown off


class LogitNoise:
    """The noise in fp16 of one request's logits. rows: {number of tokens: (largest, rms) error}."""

    def __init__(self, rows: Mapping[int, tuple[float, float]]):
        self._rows = {count: Spread(*map(float, row)) for count, row in rows.items()}
        self._usual = float(np.median([row.largest for row in self._rows.values()])) if rows else 0.0
        self.largest = max((row.largest for row in self._rows.values()), default=0.0)

    def rms(self, counts: Iterable[int]) -> float:
        """Return the rms of the median of these rows, of all rows where there it is larger.

        Up to `_TAIL` times that where a row was thrown off: later rows read what it left in the KV cache, and
        so are all off where another draw throws it off further (an engine on a GPU: by 2.6 times).
        """
        every = [row.rms for row in self._rows.values()]
        rms_values = [self._rows[count].rms for count in counts if count in self._rows] or every
        usual = max(float(np.median(rms_values)), float(np.median(every)))
        return max(usual, min(max(every) / _THROWN_OFF, _TAIL * usual))

    def at(self, count: int) -> float:
        """Return the largest error that is to be expected of a row.

        Its own, or what other rows have where that is larger, up to `_TAIL` times the usual row: on a trained model a
        row that one draw of roundings does not disturb another may (an engine on a GPU was off by 12 times). Of a
        row without noise the largest.
        """
        if count not in self._rows:
            return self.largest
        return max(self._rows[count].largest, min(self.largest, _TAIL * self._usual))


@dataclass(frozen=True)
class LogitBounds:
    noise: LogitNoise
    tolerances: Tolerances

    @property
    def cost(self) -> float:
        """Return what the precision itself costs: the largest error of a logit."""
        return self.tolerances.rounding * self.noise.largest

    @property
    def largest(self) -> float:
        fixed = self.tolerances.logits
        return self.tolerances.noise * self.cost if fixed is None else fixed

    def cost_at(self, count: int) -> float:
        return self.tolerances.rounding * self.noise.at(count)

    def at(self, count: int) -> float:
        fixed = self.tolerances.logits
        return self.tolerances.noise * self.cost_at(count) if fixed is None else fixed

    def rms(self, counts: Iterable[int]) -> float:
        times = RMS * self.tolerances.noise * self.tolerances.rounding
        return times * self.noise.rms(counts) if self.tolerances.logits is None else math.inf
