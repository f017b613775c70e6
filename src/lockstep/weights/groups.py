"""The arithmetic of quantised weights.

In: float32 numbers in groups. Out: integers with a scale for each group, and back.

Symmetric: a number is its integer times the scale of its group. The scale is the group's number of largest magnitude
over the lowest integer (-8 or -128), so that this number is exact and every integer is used; it may be negative. All
steps are single IEEE operations in float32, rounded to nearest, ties to even: the same bytes on every machine.
"""

from __future__ import annotations

import numpy as np


def scales_of(groups: np.ndarray, bits: int) -> np.ndarray:
    """Return the scale of each group, float32 [num_groups], of finite numbers, float32 [num_groups, group_size]."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)[:, 0]
    return (largest * np.float32(-1.0 / (1 << bits - 1))) + np.float32(0)  # -0 + 0 is 0: a group of zeros has one scale


def integers_of(groups: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Return the nearest integer of each number, counted from the zero point, uint8 [num_groups, group_size]."""
    half = 1 << bits - 1
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a group of zeros, or nearly
        integers = np.rint(groups / scales[:, None])
    integers = np.where(scales[:, None] == 0, np.float32(0), integers)
    return (np.clip(integers, -half, half - 1) + half).astype(np.uint8)


def pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers uint8 [..., group_size] into bytes; two of 4 bits share one, the first in the low half."""
    if bits == 8:
        return integers
    return integers[..., 0::2] | integers[..., 1::2] << 4


def unpack(data: np.ndarray, group_size: int) -> np.ndarray:
    """Unpack to uint8 [..., group_size]: the inverse of `pack`; the last dimension of `data` tells the bits."""
    # One byte for each number means 8 bits.
    if data.shape[-1] == group_size:
        return data
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], group_size)


def dequantize(
    data: np.ndarray, scales: np.ndarray, group_size: int, zero_points: np.ndarray | None = None
) -> np.ndarray:
    """Return the weight, float32 [out_features, in_features], of its integers.

    data: uint8 [out_features, num_groups, group_size * bits / 8]. scales: float32 [out_features, num_groups]. A stack
    has a dimension before these. zero_points: packed; None: the middle of the range.
    """
    bits = 8 if data.shape[-1] == group_size else 4
    zeros = np.full(scales.shape, 1 << bits - 1, np.uint8)
    if zero_points is not None and bits == 8:
        zeros = zero_points
    elif zero_points is not None:
        zeros = unpack(zero_points, 2 * zero_points.shape[-1])[..., : scales.shape[-1]]
    numbers = (unpack(data, group_size).astype(np.float32) - zeros[..., None].astype(np.float32)) * scales[..., None]
    return numbers.reshape(*data.shape[:-2], -1)
