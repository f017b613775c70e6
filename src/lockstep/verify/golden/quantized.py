"""Whether quantised weights are the checkpoint's, rounded.

In: a checkpoint's tensors, and weights as integers with scales. Out: the largest error, in steps of a weight's group.
"""

from __future__ import annotations

import numpy as np

from lockstep.artifacts.dtypes import ROW
from lockstep.artifacts.quantized import data_name, quantized_names, scales_name
from lockstep.errors import CheckError, InputError
from lockstep.tolerances import STEP
from lockstep.weights import Weights, e4m3
from lockstep.weights.groups import unpack
from lockstep.weights.source import Source

_TINY = float(np.finfo(np.float32).tiny)


def weights_error(source: Source, weights: Weights) -> float:
    """Return the largest error of a weight, in steps.

    Raises CheckError where it is more than rounding, InputError for weights that are not quantised.
    """
    if weights.group_size is None:
        raise InputError(
            f"{weights.manifest_path}: expected quantised weights, found {weights.precision}; convert again"
        )
    if weights.quantization is not None:
        source = source.with_transposed(weights.quantization.transposed)
    worst = 0.0
    for name in quantized_names(dict.fromkeys(weights.names())):
        error, allowed = _steps(source, weights, name)
        # Quantised already in the checkpoint: there is nothing to round.
        if source.stays_packed(name) or (weights.group_size == ROW and source.keeps_codes(name)):
            expected = "equal to"
            wrong = np.argwhere(error != 0)
        else:
            expected = "within half a step of"
            wrong = np.argwhere(~(error <= allowed + STEP))
        if len(wrong):
            first = tuple(map(int, wrong[0]))
            raise CheckError(
                f"{weights.manifest_path}: tensor {name!r}: expected numbers {expected} the checkpoint's, "
                f"found {len(wrong)} that are not, the first at {list(first)}, off by {error[first]:.3g} "
                f"steps; convert the checkpoint again"
            )
        worst = max(worst, float(error.max(initial=0)))
    return worst


def _steps(source: Source, weights: Weights, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the error of each number, in steps of its group, and the allowed one: half a step, at the end a whole."""
    place = source.tensors[name]
    group_size = weights.group_size
    assert group_size is not None  # checked before
    exact = source.array(name).astype(np.float64)
    if weights.quantization is not None and weights.quantization.mxfp4:
        return np.where(weights.dequantize(name) == exact, 0.0, np.inf), np.zeros(exact.shape)
    data = weights[data_name(name)]
    scales = weights[scales_name(name)].astype(np.float64)
    error = np.abs(weights.dequantize(name) - exact)
    if group_size == ROW:
        step = e4m3.steps(data.view(np.uint8)) * scales[:, None]
        is_last = np.zeros((), bool)
        zero = 448 * _TINY
    else:
        step = np.repeat(np.abs(scales), group_size, axis=1)
        zero = _TINY
        bits = 8 * data.shape[-1] // group_size
        # Integers are around a zero point in the middle: on the positive side there is one less.
        is_last = unpack(data, group_size).reshape(place.shape) == 2**bits - 1
    # A step of zero is that of a group or row of (nearly) zeros.
    in_steps = np.divide(error, step, out=np.where(error > zero, np.inf, 0.0), where=step > 0)
    return in_steps, np.where(is_last, 1.0, 0.5)
