"""Products of activations with weights on a device, which stand between the pieces of a block: see `cut_program`.

A few rows are multiplied by a kernel that reads the weight as it is stored (small_weights.cu), up to 16 at a time;
more, and weights of shapes that the kernel does not take, by cuBLAS, a small weight made fp16 before, in memory that
all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.cublas import Gemm

SOURCE = Path(__file__).with_name("small_weights.cu").read_text(encoding="utf-8")
SCALES_TIMES = 256.0  # what the kernels expect scales to be multiplied by
_ROWS, _MOST_OUTPUTS = (8, 16), 3  # of a launch of the kernel, at most: each number of rows has its own
# Rows up to which launches of the kernel are sooner done than a weight is made fp16 and read again, by its bits.
MOST_ROWS = {4: 32, 8: 32, 16: 8}
_WIDE = 8192  # out_features from which warps take two tiles
_DEQUANTIZE_THREADS = 256


class Multiplier(Protocol):
    """A product with weights that are bound."""

    def __call__(self, rows: int, x: cuda.Array, outs: Sequence[cuda.Array]) -> None:
        """Put outs[i] [rows, out_features[i]] = x [rows, in_features] times weight i, transposed, on the stream."""
        ...


@dataclass(frozen=True)
class SmallWeight:
    """Weights [out_features[i], in_features] one behind the other. data: uint8 [sum of out_features, in_features *
    bits / 8], or fp16 at 16 bits. scales: fp16 [sum of out_features, num_groups], `SCALES_TIMES` as large; at 16 bits
    data again, which is not read."""

    data: cuda.Array
    scales: cuda.Array
    bits: int
    group_size: int
    in_features: int
    out_features: tuple[int, ...]

    @property
    def fits_kernel(self) -> bool:
        """Whether 16 bytes of a row are of one group, and start where 16 bytes do."""
        columns = 128 // self.bits
        grouped = self.bits == 16 or self.group_size % columns == 0
        return grouped and self.in_features % columns == 0 and len(self.out_features) <= _MOST_OUTPUTS


class Products:
    """The kernels and cuBLAS on one stream, and the memory that they share. Calls follow each other on that stream."""

    def __init__(self, stream: cuda.Stream):
        self._stream, self._module, self._gemm = stream, cuda.compile_kernels(SOURCE), Gemm(stream)
        # For a weight as fp16: the last is as large as any that is bound; captured graphs may use those before.
        self._scratch = [cuda.empty((1,), "f2")]
        self._largest = 1
        self._kernels: dict[str, cuda.Kernel] = {}

    def bind(self, weight: SmallWeight) -> Multiplier:
        """A product with `weight`; captured graphs of it hold as long as it does, and these `Products`."""
        total, numbers = sum(weight.out_features), sum(weight.out_features) * weight.in_features
        if weight.bits < 16:
            self._largest = max(self._largest, numbers)
        starts = [0]
        for size in weight.out_features:
            starts.append(starts[-1] + size)
        tiles, warps = (2, 8) if total >= _WIDE else (1, 16)
        gemv = {most: self._kernel(f"gemv_{weight.bits}_{tiles}_{warps}_{most}") for most in _ROWS}
        ends = (starts[1:] + [total] * _MOST_OUTPUTS)[: _MOST_OUTPUTS - 1]
        sizes = total, weight.in_features, weight.group_size or weight.in_features
        few = MOST_ROWS[weight.bits] if weight.fits_kernel else 0
        dequantize = None if weight.bits == 16 else self._kernel(f"dequantize_{weight.bits}")
        blocks = -(-numbers // 8 // _DEQUANTIZE_THREADS)

        def multiply(rows: int, x: cuda.Array, outs: Sequence[cuda.Array]) -> None:
            if rows <= few:
                for first in range(0, rows, _ROWS[-1]):
                    piece = slice(first, min(first + _ROWS[-1], rows))
                    most = next(most for most in _ROWS if piece.stop - first <= most)
                    to = [out[piece] for out in outs]
                    to += [to[-1]] * (_MOST_OUTPUTS - len(to))
                    given: tuple[cuda.Array | int, ...]
                    given = weight.data, weight.scales, x[piece], *to, *ends, *sizes, piece.stop - first
                    gemv[most].launch(self._stream, -(-total // (16 * tiles)), 32 * warps, *given)
                return
            whole = weight.data
            if dequantize is not None:
                whole = self._room().reshape(total, weight.in_features)
                made = weight.data, weight.scales, whole, weight.in_features, weight.group_size, total
                dequantize.launch(self._stream, blocks, _DEQUANTIZE_THREADS, *made)
            for low, high, out in zip(starts, starts[1:], outs):
                self._gemm(whole[low:high], rows, x, out)

        return multiply

    def _room(self) -> cuda.Array:
        """Made with the first call, when all products are bound."""
        if math.prod(self._scratch[-1].shape) < self._largest:
            self._scratch.append(cuda.empty((self._largest,), "f2", "a weight as fp16"))
        return self._scratch[-1]

    def _kernel(self, name: str) -> cuda.Kernel:
        if name not in self._kernels:
            self._kernels[name] = self._module[name]
        return self._kernels[name]
