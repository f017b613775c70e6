"""Read weights that a checkpoint holds packed.

They are its own integers, scales and zero points, read by rows.

In: the tensors of one weight as they lie in the file. Out: integers with scales as `MatMulNBits` reads them, to the
integer the same; or the numbers that they stand for, float32. Layouts: `config.packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.config.packing import Packing
from lockstep.weights.groups import pack

_BLOCK = 1 << 20  # numbers that are unpacked together
_ROWS = 8  # a block has a multiple of them: rows that share a word of AWQ's
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the first, the second ... number stands


class PackedValues(ValueError):
    """Values that config.json says otherwise. part: of the weight; remedy: what to do."""

    def __init__(self, part: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"expected {expected}, found {found}; {remedy}")
        self.part = part


@dataclass(frozen=True)
class Packed:
    """A packed weight of `shape` [out_features, in_features].

    arrays: its tensors by role (`checkpoint.packed.PackedWeight`), those that are asked for.
    """

    packing: Packing
    shape: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]

    def blocks(self) -> Iterator[slice]:
        """Return the rows that are unpacked together, in order."""
        return row_blocks(self.shape)

    def integers(self, rows: slice) -> np.ndarray:
        """Return the integers of some rows, uint8 [rows, in_features].

        Signed ones are counted from the middle of their range.
        """
        data = self.arrays["data"]
        bits = self.packing.bits
        layout = self.packing.layout
        if layout == "int8":
            return (data[rows].astype(np.int16) + 128).astype(np.uint8)
        if layout == "packed":
            return _numbers(data[rows], bits)
        if layout == "awq":
            return np.ascontiguousarray(_numbers(data[:, self._words(rows)], bits, _AWQ_ORDER).T)
        return _numbers(data[:, rows].T, bits)

    def scales(self, rows: slice, group_size: int | None = None) -> np.ndarray:
        """Return the scales of some rows, float32 [rows, num_groups].

        They are of groups of `group_size`, of which several may be one of the checkpoint's.
        """
        scales = self.arrays["scales"]
        mine = scales[rows] if self.packing.layout in ("packed", "int8") else scales[:, rows].T
        return self._repeated(np.ascontiguousarray(mine).astype(np.float32), group_size)

    def zero_points(self, rows: slice, group_size: int | None = None) -> np.ndarray:
        """Return the zero points of some rows, int16 [rows, num_groups].

        Groups are as of `scales`.
        """
        if "zero_points" not in self.arrays:
            groups = self.shape[1] // (group_size or self.packing.group_size or self.shape[1])
            return np.full((rows.stop - rows.start, groups), 1 << self.packing.bits - 1, np.int16)
        array = self.arrays["zero_points"]
        bits = self.packing.bits
        if self.packing.layout == "int8":
            return self._repeated(array[rows].astype(np.int16) + 128, group_size)
        if self.packing.layout == "packed":
            return self._repeated(_numbers(array.T, bits).T[rows].astype(np.int16), group_size)
        order = _AWQ_ORDER if self.packing.layout == "awq" else None
        stored = _numbers(array[:, self._words(rows)], bits, order).T
        return self._repeated(stored.astype(np.int16) + (self.packing.layout == "gptq"), group_size)

    def numbers(self, rows: slice) -> np.ndarray:
        """Return the numbers that some rows stand for, float32 [rows, in_features].

        Each is rounded once, and not at all for scales of 16 bits.
        """
        scales = self.scales(rows)
        zeros = self.zero_points(rows).astype(np.float32)
        if self.packing.ordered and "order" in self.arrays:
            order = self.arrays["order"]
            return (self.integers(rows).astype(np.float32) - zeros[:, order]) * scales[:, order]
        groups = self.integers(rows).reshape(*scales.shape, -1).astype(np.float32)
        return ((groups - zeros[..., None]) * scales[..., None]).reshape(-1, self.shape[1])

    def order(self) -> np.ndarray:
        """Return the column of each place within the groups, int64 [in_features]."""
        columns = self.shape[1]
        return np.argsort(self.arrays["order"], kind="stable") if "order" in self.arrays else np.arange(columns)

    def check(self) -> None:
        """Raise PackedValues for what config.json says otherwise."""
        columns = self.shape[1]
        middle = 1 << self.packing.bits - 1
        if "order" in self.arrays:
            order = self.arrays["order"]
            size = self.packing.group_size or columns
            if self.packing.ordered and (
                order.min() < 0 or not np.array_equal(np.bincount(order), np.full(columns // size, size))
            ):
                expected = f"{columns // size} groups of {size} columns"
                found = f"{order.min()} to {order.max()}"
                raise PackedValues("order", expected, found, "download this file again")
            # Zeros of a file whose g_idx nobody filled in: with desc_act false, readers do not look at it.
            if not self.packing.ordered and order.any() and not np.array_equal(order, np.arange(columns) // size):
                raise PackedValues(
                    "order", "columns in the order of their groups", "another",
                    "correct config.json (desc_act: true)",
                )  # fmt: skip
        if "shape" in self.arrays and self.arrays["shape"].tolist() != list(self.shape):
            found = str(self.arrays["shape"].tolist())
            raise PackedValues("shape", str(list(self.shape)), found, "download this checkpoint again")
        if "zero_points" in self.arrays:
            zeros = self.zero_points(slice(0, self.shape[0]))
            if not self.packing.zero_points and (zeros != middle).any():
                expected = f"zero points of {middle} (sym: true in config.json)"
                is_v2 = self.packing.layout == "gptq" and (zeros == middle + 1).all()
                remedy = "correct config.json" + (' (checkpoint_format: "gptq_v2")' if is_v2 else "")
                raise PackedValues("zero_points", expected, str(zeros[zeros != middle][0]), remedy)
            if zeros.max() >= 2 * middle:
                expected = f"zero points of at most {2 * middle - 1}"
                found = f"{zeros.max()}"
                remedy = "readers of the format gptq differ there, quantise it as gptq_v2"
                raise PackedValues("zero_points", expected, found, remedy)

    def _words(self, rows: slice) -> slice:
        """Return the words along a row of tensors that lie by columns."""
        return slice(rows.start * self.packing.bits // 32, rows.stop * self.packing.bits // 32)

    def _repeated(self, values: np.ndarray, group_size: int | None) -> np.ndarray:
        ours = self.shape[1] // group_size if group_size else values.shape[1]
        return np.repeat(values, ours // values.shape[1], axis=1)


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Return the rows of a weight that are read together, in order: eight or a multiple, but for the last."""
    rows, columns = shape
    step = max(_ROWS, _BLOCK // columns // _ROWS * _ROWS)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def pack_zero_points(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack zero points [rows, num_groups] as they are kept, uint8.

    They are packed along a row, which ends with a whole byte.
    """
    values = values.astype(np.uint8)
    if bits == 4 and values.shape[1] % 2:
        values = np.pad(values, ((0, 0), (0, 1)))
    return pack(values, bits)


def _numbers(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Return the numbers in 32-bit words: uint8 [rows, n * 32 / bits].

    words: [rows, n]. Numbers are taken from the low bits on, or in `order`.
    """
    shifts = np.array([bits * place for place in order or range(32 // bits)], np.uint32)
    numbers = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return numbers.astype(np.uint8).reshape(len(words), -1)
