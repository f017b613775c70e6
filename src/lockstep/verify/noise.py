"""What a precision itself costs, and which errors pass beside it. Needs no torch.

In: errors that transformers makes in fp16 on the same weights and tokens (`verify.rounded`), its noise, and the errors
of a graph or an engine. Out: whether these are no more than rounding.

Rounding errors are draws of one distribution, whose size the model and the tokens decide: activations that are a
thousand times larger than others, attention that hangs on one score. So an error is judged beside the noise of the same
numbers, in two ways: its largest value, which shows one wrong number, may be `Tolerances.noise` times the largest
noise; its rms over all numbers, which varies much less from draw to draw and shows what is a little wrong everywhere,
may be a third as many times the rms of the noise (1.3 times is seen). Of logits that is the rms of the median row: on a
trained model single rows are so sensitive that they would outweigh all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.reports import TensorError
from lockstep.onnx_tools.metrics import Difference, difference
from lockstep.targets import Tolerances
from lockstep.verify.metrics import finite, off

# Where nothing is rounded but the result, it is still off by half of the last bit of fp16: at most 2^-11 of its size,
# rms a quarter of that.
_FLOOR, _FLOOR_RMS = 2.0**-11, 2.0**-13
_TAIL = 3  # see `LogitNoise.at` and `rms`
_THROWN_OFF = 16  # times the rms of the usual row; 2 to 9 times is seen where no token is thrown off
_RMS = 1 / 3  # of `Tolerances.noise`: see above


@dataclass(frozen=True)
class Spread:
    """The size of an error: its largest value, and its rms. NaN or infinite where the error is."""

    largest: float
    rms: float

    def __or__(self, other: Spread) -> Spread:
        return Spread(max(self.largest, other.largest), max(self.rms, other.rms))

    def __mul__(self, factor: float) -> Spread:
        return Spread(self.largest * factor, self.rms * factor)


def row_scale(expected: np.ndarray) -> np.ndarray:
    """Return what the error of each number of [rows, ...], float64, is relative to: max(|it|, rms of its row)."""
    rows = expected.reshape(len(expected), -1)
    return np.maximum(np.abs(rows), np.sqrt(np.mean(rows * rows, axis=1, keepdims=True)))


def spread(expected: np.ndarray, found: np.ndarray) -> Spread:
    """Return the error of an array [rows, ...], each number relative to `row_scale`.

    Floating point carries digits, not decimals; and a row (a token) of small numbers is held to its own size, whatever
    stands in others.
    """
    if not expected.size:
        return Spread(0.0, 0.0)
    exact, other = (np.asarray(array, np.float64).reshape(len(array), -1) for array in (expected, found))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(other - exact)
        relative = np.where(error == 0, 0.0, error / row_scale(exact))
        return Spread(float(relative.max()), float(np.sqrt(np.mean(relative * relative))))


def measure(
    name: str,
    expected: np.ndarray,
    found: np.ndarray,
    noisy: np.ndarray,
    tolerances: Tolerances,
    usual: Spread = Spread(0.0, 0.0),
) -> TensorError:
    """Return the error of an output, beside what passes of it.

    noisy: what fp16 gives in place of `expected`. usual: noise of such outputs, which counts where it is larger.
    """
    noise = spread(expected, noisy) | usual
    return beside_noise(name, difference(expected, found), spread(expected, found), noise, tolerances)


def beside_noise(name: str, absolute: Difference, error: Spread, noise: Spread, tolerances: Tolerances) -> TensorError:
    fixed = tolerances.logits if name == "logits" else tolerances.block
    times, own = tolerances.noise * tolerances.rounding, noise * tolerances.rounding
    bound = Spread(times * max(noise.largest, _FLOOR), _RMS * times * max(noise.rms, _FLOOR_RMS))
    if fixed is not None:
        bound = Spread(fixed, math.inf)
    return TensorError(
        max_abs_error=absolute.max_abs_error,
        relative_error=finite(error.largest),
        rms_error=finite(error.rms),
        cosine=absolute.cosine,
        noise=own.largest,
        rms_noise=own.rms,
        tolerance=bound.largest,
        rms_tolerance=finite(bound.rms),
    )


def wrong(name: str, error: TensorError, tolerances: Tolerances) -> str | None:
    """Say what is wrong with an output; None where its error passes: that of logits, absolute if a number is given."""
    if error.max_abs_error is None:
        return f"{name}: expected finite numbers, found NaN or infinity"
    if name == "logits" and tolerances.logits is not None:
        is_off = error.max_abs_error > tolerances.logits
        return f"{name}: {off(error.max_abs_error, tolerances.logits)}" if is_off else None
    largest, rms = (math.inf if number is None else number for number in (error.relative_error, error.rms_error))
    if largest > error.tolerance:
        more = f"largest absolute error {error.max_abs_error:.3g}, cosine {error.cosine:.6f}"
        return f"{name}: expected an error of at most {error.tolerance:.3g}, found {largest:.3g} ({more})"
    if error.rms_tolerance is not None and rms > error.rms_tolerance:
        more = f"largest {largest:.3g}, cosine {error.cosine:.6f}"
        return f"{name}: expected an rms error of at most {error.rms_tolerance:.3g}, found {rms:.3g} ({more})"
    return None


class LogitNoise:
    """The noise in fp16 of one request's logits. rows: {number of tokens: (largest, rms) error}."""

    def __init__(self, rows: Mapping[int, tuple[float, float]]):
        self._rows = {count: Spread(*map(float, row)) for count, row in rows.items()}
        self._usual = float(np.median([row.largest for row in self._rows.values()])) if rows else 0.0
        self.largest = max((row.largest for row in self._rows.values()), default=0.0)

    def rms(self, counts: Iterable[int]) -> float:
        """Return the rms of the median of these rows, of all rows where there it is larger.

        Up to `_TAIL` times that where a row was thrown off: the rows behind it read what it left in the KV cache, and
        so are all off where another draw throws it off further (an engine on a GPU: by 2.6 times).
        """
        every = [row.rms for row in self._rows.values()]
        own = [self._rows[count].rms for count in counts if count in self._rows] or every
        usual = max(float(np.median(own)), float(np.median(every)))
        return max(usual, min(max(every) / _THROWN_OFF, _TAIL * usual))

    def at(self, count: int) -> float:
        """Return the largest error that is to be expected of a row.

        Its own, or what other rows have where that is larger, up to `_TAIL` times the usual row: on a trained model a
        row that one draw of roundings left alone another may throw off (an engine on a GPU was off by 12 times). Of a
        row without noise of its own the largest.
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

    def at(self, count: int) -> float:
        fixed, times = self.tolerances.logits, self.tolerances.noise * self.tolerances.rounding
        return times * self.noise.at(count) if fixed is None else fixed

    def rms(self, counts: Iterable[int]) -> float:
        times = _RMS * self.tolerances.noise * self.tolerances.rounding
        return times * self.noise.rms(counts) if self.tolerances.logits is None else math.inf
