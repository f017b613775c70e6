"""Read a checkpoint's tensors in bounded pieces, by its manifest.

Numbers that are not finite are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.checkpoint import RESOLVE_AGAIN, CheckpointManifest
from lockstep.artifacts.dtypes import DTYPE_BITS, FLOAT_DTYPES, INTEGER_DTYPES, numpy_dtype
from lockstep.artifacts.places import TensorPlace
from lockstep.artifacts.quantized import QuantizedTensors, data_name, scales_name
from lockstep.checkpoint.language import language_tensors
from lockstep.checkpoint.packed import PackedWeight, packed_weights, unpacked_places
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.config.packing import INTEGERS, Packing, packing_of
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import check_stored
from lockstep.weights.coded import Coded
from lockstep.weights.mxfp4 import NO_NUMBER
from lockstep.weights.packed import Packed, PackedValues
from lockstep.weights.scan import NonFinite, count_non_finite, is_finite, largest_bits

# Large enough that calls cost nothing, small enough that a piece is still in the cache when it is scanned, cast and
# hashed.
PIECE_BYTES = 4 << 20
_CODES = ("F8_E4M3", "F8_E8M0")


@dataclass(frozen=True)
class Source:
    """A checkpoint as its manifest describes it.

    Every file was found, of the size it had when the manifest was made.

    tensors: by name; weights that are quantised already are one each, as the floats that they stand for, and stand in
    `packed` besides. transposed: which are read as [out_features, in_features], and lie in the file as
    [in_features, out_features].
    """

    folder: Path
    manifest: CheckpointManifest
    tensors: Mapping[str, TensorPlace]
    packing: Packing | None = None
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)
    transposed: Collection[str] = ()

    def files(self) -> list[str]:
        """Return the files that hold tensors, sorted."""
        return sorted({place.file for place in self.manifest.tensors.values()})

    def with_transposed(self, names: Collection[str]) -> Source:
        """Return the same tensors, of which those named, matrices, are read transposed."""
        turned = {name: replace(self.tensors[name], shape=self.tensors[name].shape[::-1]) for name in names}
        return replace(self, tensors={**self.tensors, **turned}, transposed=names)

    def stays_packed(self, name: str) -> bool:
        """Return whether graphs take the integers of a tensor as the checkpoint has them."""
        return name in self.packed and self.packing is not None and self.packing.stays

    def keeps_codes(self, name: str) -> bool:
        """Return whether a tensor is e4m3 numbers with one scale, or one a row: what w8a8-fp8 takes as it is."""
        packing = self.packing
        return name in self.packed and packing is not None and packing.layout == "fp8" and packing.block is None

    def coded(self, name: str) -> Coded:
        """Read a weight that is kept as codes. Raises InputError for what config.json says otherwise."""
        coded = self._open(name)
        assert isinstance(coded, Coded)  # of a layout of codes
        return coded

    def kept(self, quantized: QuantizedTensors | None) -> dict[str, TensorPlace]:
        """Return the parts of `quantized` that lie in the checkpoint as they are bound: those of MXFP4.

        Raises InputError for a shared exponent that stands for no number.
        """
        places = self.manifest.tensors
        found = dict[str, TensorPlace]()
        if quantized is None or not quantized.mxfp4:
            return found
        raw = replace(self, tensors=places, packed={})
        for name in quantized.bits:
            data, scales = (self.packed[name].parts[role] for role in ("data", "scales"))
            if (raw.array(scales) == NO_NUMBER).any():
                raise InputError(
                    f"{raw.words(scales)}: expected finite numbers, found the exponent {NO_NUMBER}, which is none; "
                    f"download this file again"
                )
            found |= {data_name(name): places[data], scales_name(name): places[scales]}
        return found

    def float_dtypes(self) -> set[str]:
        return {place.dtype for place in self.tensors.values() if place.dtype in FLOAT_DTYPES}

    def words(self, name: str) -> str:
        """Return a tensor's file, name, dtype and shape, as an error opens with them."""
        place = self.tensors[name]
        return f"{self.folder / place.file}: tensor {name!r} ({place.dtype} {list(place.shape)})"

    def pieces(self, name: str, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """Yield a tensor's bytes as uint8 views of `buffer`.

        Each is valid until the next is asked for.

        `buffer` is a uint8 array of PIECE_BYTES. Read, not mapped: a file that shrinks meanwhile is then an error, not
        a SIGBUS.
        """
        if name in self.transposed:
            stored = replace(self, tensors=self.manifest.tensors, transposed=()).array(name)
            data = np.ascontiguousarray(stored.T).reshape(-1).view(np.uint8)
            yield from (data[start : start + PIECE_BYTES] for start in range(0, data.size, PIECE_BYTES))
            return
        if name in self.packed:
            packed = self._open(name)
            for rows in packed.blocks():
                numbers = packed.numbers(rows).reshape(-1).view(np.uint8)
                yield from (numbers[start : start + PIECE_BYTES] for start in range(0, numbers.size, PIECE_BYTES))
            return
        place = self.tensors[name]
        with open(self.folder / place.file, "rb", buffering=0) as file:
            file.seek(place.offset)
            for start in range(0, place.length, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, place.length - start)]
                filled = 0
                while filled < piece.size:
                    count = file.readinto(piece.data[filled:])
                    if not count:
                        raise InputError(
                            f"{self.words(name)}: expected {place.length} bytes at byte {place.offset}, found the end "
                            f"of the file; restore it or resolve the checkpoint again"
                        )
                    filled += count
                yield piece

    def open_packed(self, name: str, *parts: str) -> Packed:
        """Read a packed weight, its tensors in memory as they lie in the file.

        parts: which of its tensors are read; none given: all.

        Raises InputError for scales that are not finite, and for values that config.json says otherwise.
        """
        packed = self._open(name, *parts)
        assert isinstance(packed, Packed)  # of integers that stay
        return packed

    def _open(self, name: str, *parts: str) -> Packed | Coded:
        assert self.packing is not None  # it says which are packed
        weight = self.packed[name]
        places = self.manifest.tensors
        of_weight = {tensor: _as_bytes(places[tensor]) for tensor in weight.parts.values()}
        raw = Source(self.folder, self.manifest, of_weight)
        arrays = {part: raw.array(tensor) for part, tensor in weight.parts.items() if not parts or part in parts}
        packed = (Packed if self.packing.layout in INTEGERS else Coded)(self.packing, weight.shape, arrays)
        try:
            packed.check()
        except PackedValues as error:
            raise InputError(f"{raw.words(weight.parts[error.part])}: {error}") from None
        return packed

    def array(self, name: str) -> np.ndarray:
        """Read a whole tensor. Raises InputError for floats that are not finite."""
        place = self.tensors[name]
        buffer = np.empty(PIECE_BYTES, np.uint8)
        raw = np.empty(place.length, np.uint8)
        filled = 0
        is_float = place.dtype in FLOAT_DTYPES
        for piece in (each for each, _ in self.finite_pieces(name, buffer)) if is_float else self.pieces(name, buffer):
            raw[filled : filled + piece.size] = piece
            filled += piece.size
        return raw.view(numpy_dtype(place.dtype)).reshape(place.shape)

    def finite_pieces(self, name: str, buffer: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Yield `pieces` of a float tensor, each with the bits of its largest magnitude.

        Raises InputError at NaN and infinity.
        """
        dtype = self.tensors[name].dtype
        for piece in self.pieces(name, buffer):
            bits = largest_bits(dtype, piece)
            if not is_finite(dtype, bits):
                self._refuse_non_finite(name, buffer)
            yield piece, bits

    def _refuse_non_finite(self, name: str, buffer: np.ndarray) -> None:
        """Read the whole tensor once more for the numbers that the user needs to see."""
        total = NonFinite(-1, 0, 0)
        position = 0
        dtype = self.tensors[name].dtype
        for piece in self.pieces(name, buffer):
            found = count_non_finite(dtype, piece)
            if found:
                first = total.first if total.first >= 0 else position + found.first
                total = NonFinite(first, total.nans + found.nans, total.infinities + found.infinities)
            position += piece.size * 8 // DTYPE_BITS[dtype]
        raise InputError(
            f"{self.words(name)}: expected finite numbers, found {total.nans} NaN and {total.infinities} infinite, the "
            f"first at flat index {total.first}; download this file again, or use another checkpoint if it was trained "
            f"to this"
        )


def _as_bytes(place: TensorPlace) -> TensorPlace:
    """Return the place of a tensor whose type NumPy lacks as that of its codes, a byte each."""
    return replace(place, dtype="U8") if place.dtype in _CODES else place


def open_source(checkpoint_json: Path) -> Source:
    """Open a checkpoint by its manifest.

    Raises InputError when a file has changed since `resolve`, or holds tensors of a type that cannot be read yet.
    """
    manifest = CheckpointManifest.load(checkpoint_json)
    source = Source(manifest.folder_of(checkpoint_json), manifest, manifest.tensors)
    check_stored(manifest.files, source.folder, RESOLVE_AGAIN)
    packing = packing_of(manifest.config)
    packed = packed_weights(packing, manifest.tensors, source.folder)
    parts = {part for weight in packed.values() for part in weight.parts.values()}
    headers, _ = language_tensors(
        {name: place for file in source.files() for name, place in read_header(source.folder / file).items()}
    )
    places = set(headers.values())  # a tied head without its embedding is named as that
    for name, place in sorted(source.tensors.items()):
        if headers.get(name, place) != place or place not in places:
            raise InputError(
                f"{source.words(name)}: expected it at bytes {place.offset}+{place.length}, found the "
                f"file's header changed; resolve the checkpoint again"
            )
        if place.dtype not in FLOAT_DTYPES + INTEGER_DTYPES and name not in parts:
            known = f"{', '.join(FLOAT_DTYPES)} or integers"
            raise InputError(
                f"{source.words(name)}: expected {known}, found {place.dtype}, which is not supported yet; "
                f"use a checkpoint that is not quantized"
            )
    return replace(source, tensors=unpacked_places(manifest.tensors, packed), packing=packing, packed=packed)
