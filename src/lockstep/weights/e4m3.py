"""The arithmetic of weights of e4m3 numbers (float8_e4m3fn).

In: float32 rows. Out: e4m3 numbers and a scale for each row, and back.

The scale is the row's largest magnitude over 448, the largest number of e4m3. All of it is single IEEE operations in
float32, rounded to nearest, ties to even: the same bytes on every machine.
"""

from __future__ import annotations

import numpy as np

from lockstep.artifacts.dtypes import named_dtype

_LARGEST = np.float32(448)
_TINY = np.finfo(np.float32).tiny  # a smaller scale is set to 0
NAN = 0x7F  # the code of NaN without its sign


def row_scales(rows: np.ndarray) -> np.ndarray:
    """Return the scale of each row, float32 [out_features]; rows: finite, float32 [out_features, in_features]."""
    scales = np.abs(rows).max(axis=1) / _LARGEST
    return np.where(scales < _TINY, np.float32(0), scales)


def codes_of(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the nearest code of each number, uint8 [out_features, in_features]."""
    numbers = rows / np.where(scales == 0, np.float32(np.inf), scales)[:, None]
    # A quotient may round to more than 448, which would become NaN: e4m3fn has no infinity.
    return np.clip(numbers, -_LARGEST, _LARGEST).astype(named_dtype("float8_e4m3fn")).view(np.uint8)


def steps(codes: np.ndarray) -> np.ndarray:
    """Return the distance from each code's number to the next larger one, float32, of scale 1."""
    return np.ldexp(np.float32(1), np.maximum((codes & NAN) >> 3, 1).astype(np.int32) - 10)


def rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return activations as e4m3 numbers and the step of each row, both float32 (`onnx_tools.fp8_products`)."""
    # The lower bound is for a row of zeros, and the same as in the graphs.
    steps = np.maximum(np.abs(rows).max(axis=1, keepdims=True) / _LARGEST, np.float32(1e-30))
    return (rows / steps).astype(named_dtype("float8_e4m3fn")).astype(np.float32), steps


def dequantize(data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weight, float32, of its e4m3 numbers [out_features, in_features] and scales [out_features]."""
    return data.astype(np.float32) * scales[:, None]
