"""Weights at run time: a manifest in, read-only arrays of mapped files out. Python 3.10 and NumPy 1.26."""

from __future__ import annotations

import difflib
import math
import mmap
import os
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from lockstep.artifacts.dtypes import DTYPE_BITS, ROW, numpy_dtype
from lockstep.artifacts.places import TensorPlace
from lockstep.artifacts.quantized import (
    QuantizedTensors,
    data_name,
    order_name,
    quantized_names,
    scales_name,
    zero_points_name,
)
from lockstep.artifacts.weights import WeightsManifest
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import check_stored
from lockstep.weights import e4m3
from lockstep.weights.groups import dequantize
from lockstep.weights.mxfp4 import mxfp4_numbers


class Tensors(Protocol):
    """Weights: a checkpoint's tensors by their names, or a rank's slots, whose arrays may have gaps (strides)."""

    @property
    def checkpoint(self) -> object:
        """Return an object that identifies the checkpoint."""

    def identity(self, name: str) -> Hashable:
        """Return a key that is equal for equal arrays of one checkpoint."""

    def __getitem__(self, name: str) -> np.ndarray: ...

    def location(self, name: str) -> tuple[Path, int, int] | None:
        """Return (path, offset in bytes, length in bytes) of an array; None where no file holds just these bytes."""


class Weights:
    """The tensors of a weights manifest, {name: array}: views of the mapped files, one copy for all users."""

    def __init__(
        self,
        manifest_path: Path,
        precision: str,
        paths: Mapping[str, Path],
        maps: Mapping[str, np.ndarray],
        tensors: Mapping[str, TensorPlace],
        group_size: int | None = None,
        transposed: Collection[str] = (),
    ):
        self.manifest_path = manifest_path
        self.precision = precision
        self.group_size = group_size
        self._transposed = transposed
        self._paths = paths
        self._maps = maps
        self._tensors = tensors

    @classmethod
    def open(cls, manifest_path: str | os.PathLike) -> Weights:
        """Open a weights manifest and map its files. Raises InputError for a file that is absent or has changed."""
        manifest_path = Path(manifest_path)
        manifest = WeightsManifest.load(manifest_path)
        paths = {file.path: manifest_path.parent / file.path for file in manifest.files}
        check_stored(manifest.files, manifest_path.parent, "convert the checkpoint again")
        maps = {}
        for name, path in paths.items():
            # The array keeps the map alive after the file is closed.
            with open(path, "rb") as file:
                maps[name] = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        for name, info in manifest.tensors.items():
            _check_place(manifest_path, name, info, maps[info.file].size)
        group_size = manifest.group_size
        return cls(manifest_path, manifest.precision, paths, maps, manifest.tensors, group_size, manifest.transposed)

    @property
    def checkpoint(self) -> object:
        return self

    def identity(self, name: str) -> str:
        return name

    def names(self) -> list[str]:
        return sorted(self._tensors)

    @property
    def quantization(self) -> QuantizedTensors | None:
        """Return the quantised tensors and their layout; None if there are none."""
        if self.group_size is None:
            return None
        names = quantized_names(self._tensors)
        if self.group_size == ROW:
            return QuantizedTensors(ROW, dict.fromkeys(names, 8), transposed=tuple(self._transposed))
        bits = {name: 8 * self.info(data_name(name)).shape[-1] // self.group_size for name in names}
        return QuantizedTensors(
            self.group_size,
            bits,
            any(zero_points_name(name) in self._tensors for name in names),
            any(order_name(name) in self._tensors for name in names),
            any(map(self._is_mxfp4, names)),
            tuple(self._transposed),
        )

    def dequantized(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all tensors by their names and in the shapes of the checkpoint, quantised ones as float32, sorted."""
        quantized = quantized_names(self._tensors)
        parts: set[str] = set()
        for name in quantized:
            parts |= {data_name(name), scales_name(name), zero_points_name(name), order_name(name)}
        for name in sorted({*self._tensors, *quantized} - parts):
            array = self.dequantize(name) if name in quantized else self[name]
            if name in self._transposed:
                array = array.T
            yield name, array

    def dequantize(self, name: str) -> np.ndarray:
        """Return the numbers of a quantised tensor, float32 [out_features, in_features].

        A stack is [num_experts, out_features, in_features], or for MXFP4 [num_experts, in_features, out_features].
        """
        data = self[data_name(name)]
        scales = self[scales_name(name)]
        if self.group_size == ROW:
            if data.ndim != 2 or scales.shape != data.shape[:1]:
                self._refuse_scales(name, "row", data, scales)
            return e4m3.dequantize(data, scales)
        if self._is_mxfp4(name):
            return mxfp4_numbers(data, scales).swapaxes(1, 2)
        zeros = self[zero_points_name(name)] if zero_points_name(name) in self._tensors else None
        num_zeros = None  # shape of the packed zero points
        if data.ndim in (3, 4) and self.group_size:
            num_bytes = data.shape[-2] * data.shape[-1]
            num_zeros = (*data.shape[:-2], (num_bytes + self.group_size - 1) // self.group_size)
        if num_zeros is None or scales.shape != data.shape[:-1] or (zeros is not None and zeros.shape != num_zeros):
            self._refuse_scales(name, "group", data, scales)
        assert self.group_size is not None  # else rejected above
        numbers = dequantize(data, scales, self.group_size, zeros)
        if order_name(name) not in self._tensors:
            return numbers
        # The order has the column of each place within the groups: numbers go back to their columns.
        ordered = np.empty_like(numbers)
        ordered[:, self[order_name(name)]] = numbers
        return ordered

    def _refuse_scales(self, name: str, unit: str, data: np.ndarray, scales: np.ndarray) -> NoReturn:
        raise InputError(
            f"{self.manifest_path}: expected tensor {name!r} with a scale for each {unit}, found "
            f"{list(data.shape)} with {list(scales.shape)}; convert the checkpoint again"
        )

    def _is_mxfp4(self, name: str) -> bool:
        return self.info(scales_name(name)).dtype == "U8"

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._key(name) in self._tensors

    def _key(self, name: str) -> str:
        """Return a name as in the checkpoint: those of a bare decoder leave out its first part ("transformer.")."""
        return name if name in self._tensors else name.partition(".")[2]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._tensors)

    def check_precision(self, expected: str, where: str | os.PathLike) -> None:
        """Raise InputError for weights of another precision than that of the assembly `where`."""
        if self.precision != expected:
            raise InputError(
                f"{self.manifest_path}: precision: expected {expected} as in {where}, found {self.precision}; give the "
                "weights of this precision"
            )

    def unused(self, names: Iterable[str]) -> list[str]:
        return sorted(set(self._tensors) - {self._key(name) for name in names})

    def info(self, name: str) -> TensorPlace:
        """Return a tensor's file, bytes, dtype and shape. Raises InputError that suggests the nearest names."""
        try:
            return self._tensors[self._key(name)]
        except KeyError:
            actual = f"{len(self)} others"
            if near := difflib.get_close_matches(name, self.names(), n=3):
                actual = f"the nearest are {', '.join(near)}"
            raise InputError(
                f"{self.manifest_path}: expected tensor {name!r}, found none of this name "
                f"({actual}); is this the checkpoint of this model?"
            ) from None

    def location(self, name: str) -> tuple[Path, int, int]:
        """Return (path, offset in bytes, length in bytes) of a tensor, with links in the path resolved."""
        info = self.info(name)
        return Path(os.path.realpath(self._paths[info.file])), info.offset, info.length

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the tensor as a read-only array of its shape, `ml_dtypes.bfloat16` for BF16.

        A view of the file, or a copy where the file (of an old writer) does not align it to its element.
        """
        info = self.info(name)
        raw = self._maps[info.file][info.offset : info.offset + info.length]
        array = raw.view(numpy_dtype(info.dtype)).reshape(info.shape)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return array

    def drop_pages(self) -> None:
        """Return the memory of mapped pages to the system; pages that are read later are read from the file again."""
        for mapped in self._maps.values():
            cast(Any, mapped.base).obj.madvise(mmap.MADV_DONTNEED)


def _check_place(manifest_path: Path, name: str, info: TensorPlace, size: int) -> None:
    """Check that a tensor lies within its file of `size` bytes. Raises InputError.

    A manifest is our own, but its numbers choose which memory is read: they are checked as those of any file.
    """
    length = math.prod(info.shape) * DTYPE_BITS.get(info.dtype, 0) // 8
    if info.length != length or info.offset < 0 or info.offset + info.length > size:
        raise InputError(
            f"{manifest_path}: expected tensor {name!r} within its file, found {info}; delete "
            f"the file and convert the checkpoint again"
        )
