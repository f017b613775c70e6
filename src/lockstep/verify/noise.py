"""The noise of logits in a precision, and the bounds of errors that follow from it. Needs no torch.

In: the errors of transformers in fp16 on the same weights and tokens (`verify.rounded`): its noise. Out: the largest
allowed error of each row. The rms of logits is that of the median row: on a trained model single rows are so sensitive
that they would outweigh all others.
"""

from __future__ import annotations

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
        """Return the rms of the median of these rows, or of the median of all rows where that is larger."""
        all_rows = [row.rms for row in self._rows.values()]
        these_rows = [self._rows[count].rms for count in counts if count in self._rows] or all_rows
        usual = max(float(np.median(these_rows)), float(np.median(all_rows)))
        # More where rounding throws one row off: later rows read its keys and values in the KV cache, and an engine
        # that rounds it otherwise may be off by more in all of them (on a GPU by 2.6 times).
        return max(usual, min(max(all_rows) / THROWN_OFF, TAIL * usual))

    def at(self, count: int) -> float:
        """Return the largest error to expect of a row: its noise; for a row without noise the largest of all."""
        if count not in self._rows:
            return self.largest
        # On a trained model one way of rounding leaves a row undisturbed that another disturbs (an engine on a GPU was
        # off by 12 times the row's noise). So the noise of other rows counts too, within limits.
        return max(self._rows[count].largest, min(self.largest, TAIL * self._usual))


@dataclass(frozen=True)
class LogitBounds:
    """What passes of one request's logits. `count` is the number of tokens that a row of them follows."""

    noise: LogitNoise
    tolerances: Tolerances

    @property
    def cost(self) -> float:
        """Return the largest error of a logit in this precision: its noise, times the units of this rounding."""
        return self.tolerances.rounding * self.noise.largest

    @property
    def largest(self) -> float:
        return self.tolerances.noise * self.cost

    def cost_at(self, count: int) -> float:
        return self.tolerances.rounding * self.noise.at(count)

    def at(self, count: int) -> float:
        return self.tolerances.noise * self.cost_at(count)

    def rms(self, counts: Iterable[int]) -> float:
        return RMS * self.tolerances.noise * self.tolerances.rounding * self.noise.rms(counts)
