"""The times at which requests are due, drawn before the first one is sent: nothing moves them later."""

from __future__ import annotations

import math

import numpy as np

from lockstep.errors import InputError

EXPONENTIAL = "exponential"
CONSTANT = "constant"
# How the benchmark of TensorRT-LLM's Triton backend spells them.
SPELLINGS = {"exponential_dist": EXPONENTIAL, "poisson": EXPONENTIAL}


def schedule(number: int, rate: float, kind: str, seed: int) -> np.ndarray:
    """Return arrival times [number] float64, in seconds from 0; rate: a second, or inf. Raises InputError."""
    if not rate > 0:
        raise InputError(f"--rate: expected requests per second above 0, or inf for all at once, found {rate:g}")
    if kind not in (EXPONENTIAL, CONSTANT):
        raise InputError(f"--arrivals: expected {EXPONENTIAL} or {CONSTANT}, found {kind!r}")
    if math.isinf(rate):
        return np.zeros(number)
    if kind == CONSTANT:
        return np.arange(number) / rate
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, max(number - 1, 0))
    return np.concatenate([np.zeros(min(number, 1)), np.cumsum(gaps)])


def cancellations(number: int, share: float, within: float, seed: int) -> list[float | None]:
    """Return after how many seconds each request is cancelled, up to `within`; None for the others."""
    if not 0 <= share <= 1:
        raise InputError(f"--cancel: expected a share between 0 and 1, found {share:g}")
    draws = np.random.default_rng([seed, 2])
    chosen = draws.random(number) < share
    after = draws.uniform(0, within, number)
    return [float(seconds) if one else None for one, seconds in zip(chosen, after)]
