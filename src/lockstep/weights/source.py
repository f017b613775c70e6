"""Read a checkpoint's tensors in bounded pieces, by its manifest, and reject non-finite numbers."""

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
from lockstep.weights.packed import Packed, PackedValueError
from lockstep.weights.scan import NonFinite, count_non_finite, is_finite, largest_bits

# Large enough to make calls cheap, small enough that a piece is still in the cache when it is scanned, cast and hashed.
PIECE_BYTES = 4 << 20
_CODES = ("F8_E4M3", "F8_E8M0")


@dataclass(frozen=True)
class Source:
    """A checkpoint as its manifest describes it. Every file exists, with the size in the manifest.

    tensors: by name; each quantised weight is one, in its dequantised form, and is also in `packed`. transposed: those
    that are read as [out_features, in_features] and stored as [in_features, out_features].
    """

    folder: Path
    manifest: CheckpointManifest
    tensors: Mapping[str, TensorPlace]
    packing: Packing | None = None
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)
    transposed: Collection[str] = ()

    def files(self) -> list[str]:
        return sorted({place.file for place in self.manifest.tensors.values()})

    def with_transposed(self, names: Collection[str]) -> Source:
        shapes = {name: self.tensors[name].shape[::-1] for name in names}
        places = {name: replace(self.tensors[name], shape=shape) for name, shape in shapes.items()}
        return replace(self, tensors={**self.tensors, **places}, transposed=names)

    def stays_packed(self, name: str) -> bool:
        """Return whether graphs read a tensor's integers in the checkpoint's form."""
        return name in self.packed and self.packing is not None and self.packing.stays

    def keeps_codes(self, name: str) -> bool:
        """Return whether a tensor is e4m3 numbers with one scale, or one a row: unchanged in w8a8-fp8."""
        packing = self.packing
        return name in self.packed and packing is not None and packing.layout == "fp8" and packing.block is None

    def coded(self, name: str) -> Coded:
        """Read a weight that is stored as codes. Raises InputError where it contradicts config.json."""
        coded = self._open(name)
        assert isinstance(coded, Coded)  # by its layout
        return coded

    def unchanged_parts(self, quantized: QuantizedTensors | None) -> dict[str, TensorPlace]:
        """Return the parts of MXFP4, which graphs read as stored. Raises InputError for an invalid exponent."""
        places = self.manifest.tensors
        unchanged: dict[str, TensorPlace] = {}
        if quantized is None or not quantized.mxfp4:
            return unchanged
        raw = replace(self, tensors=places, packed={})
        for name in quantized.bits:
            data = self.packed[name].parts["data"]
            scales = self.packed[name].parts["scales"]
            if (raw.array(scales) == NO_NUMBER).any():
                raise InputError(
                    f"{raw.words(scales)}: expected finite numbers, found the exponent {NO_NUMBER}, which is none; "
                    f"download this file again"
                )
            unchanged |= {data_name(name): places[data], scales_name(name): places[scales]}
        return unchanged

    def floats(self) -> list[str]:
        return [name for name, place in self.tensors.items() if place.dtype in FLOAT_DTYPES]

    def words(self, name: str) -> str:
        """Return a tensor's file, name, dtype and shape, for the start of an error message."""
        place = self.tensors[name]
        return f"{self.folder / place.file}: tensor {name!r} ({place.dtype} {list(place.shape)})"

    def pieces(self, name: str, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """Yield a tensor's bytes as uint8 views of `buffer`, each valid until the next.

        buffer: uint8 of PIECE_BYTES. Read, not mapped: a file that shrinks meanwhile is then an error, not a SIGBUS.
        """
        # Read it whole: a row of the result is spread over the whole tensor.
        if name in self.transposed:
            stored = replace(self, tensors=self.manifest.tensors, transposed=()).array(name)
            data = np.ascontiguousarray(stored.T).reshape(-1).view(np.uint8)
            yield from _cut(data)
            return
        if name in self.packed:
            packed = self._open(name)
            for rows in packed.blocks():
                yield from _cut(packed.numbers(rows).reshape(-1).view(np.uint8))
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
        """Read a packed weight, its tensors in memory in their stored form.

        parts: which of its tensors are read; without any: all. Raises InputError for scales that are not finite, and
        for values that contradict config.json.
        """
        packed = self._open(name, *parts)
        assert isinstance(packed, Packed)  # by its layout
        return packed

    def _open(self, name: str, *parts: str) -> Packed | Coded:
        assert self.packing is not None  # else nothing is packed
        weight = self.packed[name]
        places = {tensor: _as_bytes(self.manifest.tensors[tensor]) for tensor in weight.parts.values()}
        raw = Source(self.folder, self.manifest, places)
        arrays = {part: raw.array(tensor) for part, tensor in weight.parts.items() if not parts or part in parts}
        reader = Packed if self.packing.layout in INTEGERS else Coded
        packed = reader(self.packing, weight.shape, arrays)
        try:
            packed.check()
        except PackedValueError as error:
            raise InputError(f"{raw.words(weight.parts[error.part])}: {error}") from None
        return packed

    def array(self, name: str) -> np.ndarray:
        """Read a whole tensor. Raises InputError for floats that are not finite."""
        place = self.tensors[name]
        buffer = np.empty(PIECE_BYTES, np.uint8)
        raw = np.empty(place.length, np.uint8)
        filled = 0
        pieces = self.pieces(name, buffer)
        if place.dtype in FLOAT_DTYPES:
            pieces = (piece for piece, _ in self.finite_pieces(name, buffer))
        for piece in pieces:
            raw[filled : filled + piece.size] = piece
            filled += piece.size
        return raw.view(numpy_dtype(place.dtype)).reshape(place.shape)

    def finite_pieces(self, name: str, buffer: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Yield `pieces` of a float tensor, each with the bits of its largest magnitude.

        Raises InputError for NaN and infinity.
        """
        dtype = self.tensors[name].dtype
        for piece in self.pieces(name, buffer):
            bits = largest_bits(dtype, piece)
            if not is_finite(dtype, bits):
                self._refuse_non_finite(name, buffer)
            yield piece, bits

    def _refuse_non_finite(self, name: str, buffer: np.ndarray) -> None:
        """Raise InputError, after reading the whole tensor again to count what the message says."""
        total = NonFinite(-1, 0, 0)
        position = 0
        dtype = self.tensors[name].dtype
        for piece in self.pieces(name, buffer):
            count = count_non_finite(dtype, piece)
            if count:
                first = total.first
                if first < 0:
                    first = position + count.first
                total = NonFinite(first, total.nans + count.nans, total.infinities + count.infinities)
            position += piece.size * 8 // DTYPE_BITS[dtype]
        raise InputError(
            f"{self.words(name)}: expected finite numbers, found {total.nans} NaN and {total.infinities} infinite, the "
            f"first at flat index {total.first}; download this file again, or use another checkpoint if it was trained "
            f"to this"
        )


def _cut(data: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, data.size, PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _as_bytes(place: TensorPlace) -> TensorPlace:
    """Return the place of a tensor, as bytes where NumPy lacks its type of codes."""
    return replace(place, dtype="U8") if place.dtype in _CODES else place


def open_source(checkpoint_json: Path) -> Source:
    """Open a checkpoint. Raises InputError for a file that has changed since `resolve`, or an unsupported type."""
    manifest = CheckpointManifest.load(checkpoint_json)
    source = Source(manifest.folder_of(checkpoint_json), manifest, manifest.tensors)
    check_stored(manifest.files, source.folder, RESOLVE_AGAIN)
    packing = packing_of(manifest.config)
    packed = packed_weights(packing, manifest.tensors, source.folder)
    parts: set[str] = set()
    for weight in packed.values():
        parts.update(weight.parts.values())
    stored: dict[str, TensorPlace] = {}
    # Compare with the headers, though the files are unchanged: the manifest's places are not trusted.
    for file in source.files():
        stored |= read_header(source.folder / file)
    headers, _ = language_tensors(stored)
    # Compared by place: a tied head without its embedding has another name in the manifest.
    places = set(headers.values())
    for name, place in sorted(source.tensors.items()):
        if headers.get(name, place) != place or place not in places:
            raise InputError(
                f"{source.words(name)}: expected it at bytes {place.offset}+{place.length}, found the "
                f"file's header changed; resolve the checkpoint again"
            )
        if place.dtype not in FLOAT_DTYPES + INTEGER_DTYPES and name not in parts:
            raise InputError(
                f"{source.words(name)}: expected {', '.join(FLOAT_DTYPES)} or integers, found {place.dtype}, which is "
                f"not supported yet; use a checkpoint that is not quantized"
            )
    return replace(source, tensors=unpacked_places(manifest.tensors, packed), packing=packing, packed=packed)
