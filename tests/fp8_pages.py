"""Pages of an fp8 cache in NumPy: what fp8_heads.cu says. Of a head numbers of e4m3, then their scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np

PAGE = 64
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def encode(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., dim] and scales [...], as bytes."""
    heads = heads.astype(np.float32)
    largest = np.abs(heads).max(axis=-1)
    fraction, exponent = np.frexp(largest)
    exponent = np.where(np.isfinite(largest), np.clip(exponent + 14 + (fraction > 0.875), 1, 30), 31.5)
    with np.errstate(invalid="ignore"):
        codes = np.clip(heads * 2.0 ** (23 - exponent[..., None]), -448, 448).astype(E4M3)
    return codes.view(np.uint8), (exponent * 4).astype(np.uint8)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    scale = (scales.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    return codes.view(E4M3).astype(np.float32) * (scale / 256)[..., None]


def pages_of(heads: np.ndarray) -> np.ndarray:
    """[pages, heads, 64, dim] as [pages, heads, 64 * (dim + 1)] bytes."""
    codes, scales = encode(heads)
    return np.concatenate([codes.reshape(*heads.shape[:2], -1), scales], axis=2)


def heads_of(pages: np.ndarray) -> np.ndarray:
    """The other way round, float32."""
    codes = np.ascontiguousarray(pages[..., :-PAGE]).reshape(*pages.shape[:2], PAGE, -1)
    return decode(codes, np.ascontiguousarray(pages[..., -PAGE:]))
