"""Read weights that a checkpoint stores packed: integers, scales and zero points, by rows.

In: the stored tensors of one weight. Out: the same integers with scales in the layout of `MatMulNBits`, or the
dequantised numbers, float32. Layouts: `config.packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.config.packing import Packing
from lockstep.weights.groups import pack

BLOCK_SIZE = 1 << 20  # numbers that are unpacked together
_ROWS = 8  # a block has a multiple of them: rows that share a word of AWQ's
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word of the first, the second ... number


class PackedValueError(ValueError):
    """Raised for values that contradict config.json. part: of the weight; remedy: what the user can do."""

    def __init__(self, part: str, expected: str, actual: str, remedy: str) -> None:
        super().__init__(f"expected {expected}, found {actual}; {remedy}")
        self.part = part


@dataclass(frozen=True)
class Packed:
    """A packed weight of `shape` [out_features, in_features].

    arrays: the tensors that were read, by role (`checkpoint.packed.PackedWeight`).
    """

    packing: Packing
    shape: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]

    def blocks(self) -> Iterator[slice]:
        return row_blocks(self.shape)

    def integers(self, rows: slice) -> np.ndarray:
        """Return the integers of some rows, uint8 [rows, in_features], counted from the lowest of their range."""
        data = self.arrays["data"]
        bits = self.packing.bits
        layout = self.packing.layout
        if layout == "int8":
            return (data[rows].astype(np.int16) + 128).astype(np.uint8)
        if layout == "packed":
            return _unpack_words(data[rows], bits)
        if layout == "awq":
            return np.ascontiguousarray(_unpack_words(data[:, self._words(rows)], bits, _AWQ_ORDER).T)
        return _unpack_words(data[:, rows].T, bits)

    def scales(self, rows: slice, group_size: int | None = None) -> np.ndarray:
        """Return the scales of some rows, float32 [rows, num_groups], repeated to groups of `group_size`."""
        scales = self.arrays["scales"]
        if self.packing.layout not in ("packed", "int8"):  # stored by columns
            scales = scales.T
        return self._repeat_groups(np.ascontiguousarray(scales[rows]).astype(np.float32), group_size)

    def zero_points(self, rows: slice, group_size: int | None = None) -> np.ndarray:
        """Return the zero points of some rows, int16 [rows, num_groups], for the groups of `scales`."""
        if "zero_points" not in self.arrays:
            groups = self.shape[1] // (group_size or self.packing.group_size or self.shape[1])
            return np.full((rows.stop - rows.start, groups), 1 << self.packing.bits - 1, np.int16)
        array = self.arrays["zero_points"]
        bits = self.packing.bits
        if self.packing.layout == "int8":
            return self._repeat_groups(array[rows].astype(np.int16) + 128, group_size)
        if self.packing.layout == "packed":
            return self._repeat_groups(_unpack_words(array.T, bits).T[rows].astype(np.int16), group_size)
        order = _AWQ_ORDER if self.packing.layout == "awq" else None
        stored = _unpack_words(array[:, self._words(rows)], bits, order).T
        # The format gptq stores zero points less one.
        return self._repeat_groups(stored.astype(np.int16) + (self.packing.layout == "gptq"), group_size)

    def numbers(self, rows: slice) -> np.ndarray:
        """Return the dequantised numbers of some rows, float32 [rows, in_features], rounded at most once."""
        scales = self.scales(rows)
        zeros = self.zero_points(rows).astype(np.float32)
        if self.packing.ordered and "order" in self.arrays:
            order = self.arrays["order"]
            return (self.integers(rows).astype(np.float32) - zeros[:, order]) * scales[:, order]
        groups = self.integers(rows).reshape(*scales.shape, -1).astype(np.float32)
        return ((groups - zeros[..., None]) * scales[..., None]).reshape(-1, self.shape[1])

    def order(self) -> np.ndarray:
        """Return the columns in the order of their groups, int64 [in_features]."""
        if "order" not in self.arrays:
            return np.arange(self.shape[1])
        return np.argsort(self.arrays["order"], kind="stable")

    def check(self) -> None:
        """Raise PackedValueError for values that contradict config.json."""
        if "order" in self.arrays:
            self._check_order(self.arrays["order"])
        if "shape" in self.arrays and self.arrays["shape"].tolist() != list(self.shape):
            actual = str(self.arrays["shape"].tolist())
            raise PackedValueError("shape", str(list(self.shape)), actual, "download this checkpoint again")
        if "zero_points" in self.arrays:
            self._check_zero_points(self.zero_points(slice(0, self.shape[0])))

    def _check_order(self, order: np.ndarray) -> None:
        columns = self.shape[1]
        size = self.packing.group_size or columns
        if self.packing.ordered:
            sizes = np.full(columns // size, size)
            if order.min() < 0 or not np.array_equal(np.bincount(order), sizes):
                expected = f"{columns // size} groups of {size} columns"
                actual = f"{order.min()} to {order.max()}"
                raise PackedValueError("order", expected, actual, "download this file again")
        # Some files have a g_idx of zeros: with desc_act false, readers ignore it.
        elif order.any() and not np.array_equal(order, np.arange(columns) // size):
            expected = "columns in the order of their groups"
            raise PackedValueError("order", expected, "another", "correct config.json (desc_act: true)")

    def _check_zero_points(self, zeros: np.ndarray) -> None:
        middle = 1 << self.packing.bits - 1
        if not self.packing.zero_points and (zeros != middle).any():
            expected = f"zero points of {middle} (sym: true in config.json)"
            remedy = "correct config.json"
            if self.packing.layout == "gptq" and (zeros == middle + 1).all():
                remedy += ' (checkpoint_format: "gptq_v2")'
            raise PackedValueError("zero_points", expected, str(zeros[zeros != middle][0]), remedy)
        if zeros.max() >= 2 * middle:
            expected = f"zero points of at most {2 * middle - 1}"
            remedy = "readers of the format gptq differ there, quantise it as gptq_v2"
            raise PackedValueError("zero_points", expected, f"{zeros.max()}", remedy)

    def _words(self, rows: slice) -> slice:
        return slice(rows.start * self.packing.bits // 32, rows.stop * self.packing.bits // 32)

    def _repeat_groups(self, values: np.ndarray, group_size: int | None) -> np.ndarray:
        """Repeat values [rows, num_groups] of the checkpoint's groups for smaller groups of `group_size`."""
        if not group_size:
            return values
        return np.repeat(values, self.shape[1] // group_size // values.shape[1], axis=1)


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Return the rows of a weight that are read together, in order: a multiple of eight, except for the last."""
    rows, columns = shape
    # A word of AWQ and a byte of 4-bit codes hold numbers of several rows, so blocks begin at whole ones.
    step = max(_ROWS, BLOCK_SIZE // columns // _ROWS * _ROWS)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def pack_zero_points(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack zero points [rows, num_groups] into the stored form, uint8; each row ends with a whole byte."""
    values = values.astype(np.uint8)
    if bits == 4 and values.shape[1] % 2:
        values = np.pad(values, ((0, 0), (0, 1)))
    return pack(values, bits)


def _unpack_words(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Return the numbers in 32-bit words: uint8 [rows, n * 32 / bits].

    words: [rows, n]. Numbers are taken from the low bits upwards, or in `order`.
    """
    shifts = np.array([bits * position for position in order or range(32 // bits)], np.uint32)
    numbers = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return numbers.astype(np.uint8).reshape(len(words), -1)
