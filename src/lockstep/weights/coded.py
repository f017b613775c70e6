"""Read weights that a checkpoint stores as codes, as float32 numbers, by rows.

In: the stored tensors of one weight, fp8 as its bytes. Out: the number of each code times its scale, in float32: exact
for 16-bit scales, else rounded once, as the libraries that write these layouts compute it. Scales of two parts are
rounded before. Layouts: `config.packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from lockstep.checkpoint.coded import NVFP4_GROUP, BlockState
from lockstep.config.packing import MXFP4, Packing
from lockstep.weights.mxfp4 import e2m1_pairs, e8m0, mxfp4_numbers
from lockstep.weights.packed import PackedValueError, row_blocks

_OF_INT8 = np.float32(1 / 127)  # bitsandbytes: SCB is the largest magnitude of a row


@cache
def e4m3() -> np.ndarray:
    """Return the number of each code of float8 e4m3fn, float32 [256]: no infinities, NaN at 127 and 255."""
    code = np.arange(128)
    exponent = code >> 3
    mantissa = (code & 7).astype(np.float64)
    numbers = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    numbers[127] = np.nan
    return np.concatenate([numbers, -numbers]).astype(np.float32)


@dataclass(frozen=True)
class Coded:
    """A weight of `shape` [out_features, in_features], or a stack of them, that is stored as codes.

    The rows of a stack are its matrices. arrays: its tensors by role (`checkpoint.packed.PackedWeight`).
    """

    packing: Packing
    shape: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]

    def blocks(self) -> Iterator[slice]:
        if len(self.shape) == 3:
            return (slice(number, number + 1) for number in range(self.shape[0]))
        return row_blocks(self.shape)

    def numbers(self, rows: slice) -> np.ndarray:
        """Return the decoded numbers of some rows, float32 [rows, in_features], or [rows, ...] of a stack."""
        decoders = {"fp8": self._fp8, MXFP4: self._mxfp4, "bnb4": self._bnb4, "bnb8": self._bnb8}
        decode = decoders.get(self.packing.layout, self._nvfp4)
        with np.errstate(over="ignore", invalid="ignore"):  # the reader rejects non-finite numbers
            return decode(rows)

    def check(self) -> None:
        """Raise PackedValueError for a memory format that is not supported."""
        if "format" in self.arrays and self.arrays["format"].any():
            actual = f"{self.arrays['format'].reshape(-1)[0]}"
            raise PackedValueError("format", "0, rows one after another", actual, "save it with a newer bitsandbytes")

    def _fp8(self, rows: slice) -> np.ndarray:
        scales = self.arrays["scales"]
        if scales.dtype == np.uint8:
            scales = e8m0()[scales]
        scales = scales.astype(np.float32)
        if self.packing.block is None:
            scales = self.row_scales()[rows, None]
        else:
            high, wide = self.packing.block
            scales = scales[np.arange(rows.start, rows.stop) // high].repeat(wide, axis=1)[:, : self.shape[1]]
        return e4m3()[self.arrays["data"][rows]] * scales

    def row_scales(self) -> np.ndarray:
        """Return the scale of each row of fp8 that has no blocks, float32 [out_features]."""
        return np.broadcast_to(self.arrays["scales"].astype(np.float32).reshape(-1), self.shape[:1])

    def _mxfp4(self, rows: slice) -> np.ndarray:
        return mxfp4_numbers(self.arrays["data"][rows], self.arrays["scales"][rows]).swapaxes(1, 2)

    def _nvfp4(self, rows: slice) -> np.ndarray:
        scales = e4m3()[self.arrays["scales"][rows]]
        tensor_scale = self.arrays["whole"].astype(np.float32).reshape(-1)[0]
        with np.errstate(divide="ignore"):
            if self.packing.layout == "modelopt_nvfp4":
                scales = scales * tensor_scale
            else:
                scales = scales / tensor_scale
        packed = self.arrays["data"][rows]
        return e2m1_pairs()[packed].reshape(len(packed), -1) * scales.repeat(NVFP4_GROUP, axis=1)

    def _bnb8(self, rows: slice) -> np.ndarray:
        return self.arrays["data"][rows].astype(np.float32) * self.arrays["scales"][rows, None] * _OF_INT8

    def _bnb4(self, rows: slice) -> np.ndarray:
        state = BlockState.parse(self.arrays["state"].tobytes())
        columns = self.shape[1]
        # Blocks of scales run on over the ends of rows. `start` is even, as two codes are in a byte: `row_blocks` gives
        # rows in multiples of eight.
        start = rows.start * columns
        stop = rows.stop * columns
        packed = self.arrays["data"].reshape(-1)[start // 2 : -(-stop // 2)]
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[: stop - start]
        blocks = np.arange(start // state.block_size, -(-stop // state.block_size))
        scales = self.arrays["scales"][blocks]
        if state.nested is not None:
            size, offset = state.nested
            table = self.arrays["nested_table"][scales] * self.arrays["nested_scales"][blocks // size]
            scales = table + np.float32(offset)
        block = np.arange(start, stop) // state.block_size - blocks[0]
        return (self.arrays["table"][codes] * scales[block]).reshape(-1, columns)
