"""Find the weights of a checkpoint that are kept as codes: fp8, mxfp4, nvfp4, and bitsandbytes' of 4 and 8 bits.

In: how config.json says that they are packed, and the tensors' places. Out: of each weight its shape and the tensors
that it is kept as, or one line for what is absent, of another shape or type. Layouts: `config.packing`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.artifacts.places import TensorPlace
from lockstep.checkpoint.source_files import shorten
from lockstep.config.packing import MXFP4, MXFP4_GROUP, Packing
from lockstep.errors import InputError

FP8 = "F8_E4M3"
NVFP4_GROUP = 16
_SCALES = ("F32", "F16", "BF16")
_STATE = ".weight.quant_state.bitsandbytes__"  # and nf4 or fp4
_STATE_BYTES = 1 << 16
Found = tuple[str, tuple[int, ...], dict[str, str]]  # (weight, its shape, {role: tensor})


@dataclass(frozen=True)
class BlockState:
    """What bitsandbytes says of a weight of 4 bits, as JSON in a tensor.

    block_size: codes that share an absmax. nested: (block size, offset) of absmax where it is kept in 8 bits.
    """

    shape: tuple[int, int]
    block_size: int
    nested: tuple[int, float] | None

    @classmethod
    def parse(cls, data: bytes) -> BlockState:
        """Parse a quant_state. Raises ValueError for what is none."""
        try:
            state = json.loads(data)
            (rows, columns), size = state["shape"], state["blocksize"]
            nested = (state["nested_blocksize"], float(state["nested_offset"])) if "nested_offset" in state else None
        except (KeyError, TypeError) as error:
            raise ValueError(f"no {error}") from None
        sizes = (rows, columns, size, nested[0] if nested else 1)
        if any(type(each) is not int or each < 1 for each in sizes) or not math.isfinite(nested[1] if nested else 0):
            raise ValueError(f"{sizes}")
        return cls((rows, columns), size, nested)


def coded_weights(
    packing: Packing, tensors: Mapping[str, TensorPlace], folder: Path
) -> dict[str, tuple[tuple[int, ...], dict[str, str]]]:
    """Find the weights kept as codes: {name of the weight: (its shape, its tensors by role)}.

    Raises InputError, naming a file of `folder`, for parts that are absent or do not fit together.
    """
    find = {"fp8": _fp8, MXFP4: _mxfp4, "bnb4": _bnb4, "bnb8": _bnb8}.get(packing.layout, _nvfp4)
    known = _Tensors(tensors, folder, packing)
    found = filter(None, (find(known, name) for name in tensors))
    return {name: (shape, parts) for name, shape, parts in sorted(found)}


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a folder, and what is asked of those of a weight."""

    places: Mapping[str, TensorPlace]
    folder: Path
    packing: Packing

    def beside(self, name: str, *names: str) -> str:
        """Return the first of `names` that there is. Raises InputError for none beside `name`."""
        for wanted in names:
            if wanted in self.places:
                return wanted
        raise InputError(
            f"{self.folder / self.places[name].file}: expected tensor {shorten(names[0])} beside {shorten(name)}, "
            f"found none; download this checkpoint again"
        )

    def check(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        place = self.places[name]
        if place.dtype not in dtypes or place.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            refuse(name, place, self.folder, f"{' or '.join(dtypes)} {wanted}")

    def matrix(self, name: str, dtype: str, multiple: int = 1) -> tuple[int, int]:
        place = self.places[name]
        if place.dtype != dtype or len(place.shape) != 2 or 0 in place.shape or place.shape[1] % multiple:
            refuse(name, place, self.folder, f"{dtype} of two dimensions" + f", of {multiple}s" * (multiple > 1))
        return place.shape[0], place.shape[1]


def refuse(name: str, place: TensorPlace, folder: Path, expected: str) -> NoReturn:
    """Raise InputError for a part of a packed weight that is not what config.json says."""
    raise InputError(
        f"{folder / place.file}: tensor {shorten(name)}: expected {expected}, found {place.dtype} {list(place.shape)}; "
        f"does config.json (quantization_config) belong to these weights?"
    )


def _fp8(tensors: _Tensors, name: str) -> Found | None:
    module, _, suffix = name.rpartition(".")
    if suffix != "weight" or tensors.places[name].dtype != FP8:
        return None
    scales = tensors.beside(name, f"{module}.weight_scale_inv", f"{module}.weight_scale")
    rows, columns = tensors.matrix(name, FP8)
    if tensors.packing.block is None:
        tensors.check(scales, _SCALES, (rows, 1), (rows,), (1, 1), (1,), ())
    else:
        high, wide = tensors.packing.block
        tensors.check(scales, (*_SCALES, "F8_E8M0"), (-(-rows // high), -(-columns // wide)))
    return name, (rows, columns), {"data": name, "scales": scales}


def _mxfp4(tensors: _Tensors, name: str) -> Found | None:
    weight, mark, rest = name.rpartition("_blocks")
    if not mark or rest:
        return None
    place = tensors.places[name]
    scales = tensors.beside(name, f"{weight}_scales")
    if place.dtype != "U8" or len(place.shape) != 4 or place.shape[3] != MXFP4_GROUP // 2 or 0 in place.shape:
        refuse(name, place, tensors.folder, f"U8 of four dimensions, the last of {MXFP4_GROUP // 2}")
    experts, rows, groups, _ = place.shape
    tensors.check(scales, ("U8",), (experts, rows, groups))
    return weight, (experts, groups * MXFP4_GROUP, rows), {"data": name, "scales": scales}


def _nvfp4(tensors: _Tensors, name: str) -> Found | None:
    module, _, suffix = name.rpartition(".")
    if suffix != "weight_scale":
        return None
    own = "weight" if tensors.packing.layout == "modelopt_nvfp4" else "weight_packed"
    data = tensors.beside(name, f"{module}.{own}")
    whole = tensors.beside(name, f"{module}.{'weight_scale_2' if own == 'weight' else 'weight_global_scale'}")
    rows, packed = tensors.matrix(data, "U8", NVFP4_GROUP // 2)
    tensors.check(name, (FP8,), (rows, 2 * packed // NVFP4_GROUP))
    tensors.check(whole, ("F32",), (1,), ())
    return f"{module}.weight", (rows, 2 * packed), {"data": data, "scales": name, "whole": whole}


def _bnb8(tensors: _Tensors, name: str) -> Found | None:
    module, _, suffix = name.rpartition(".")
    if suffix != "SCB":
        return None
    data = tensors.beside(name, f"{module}.weight")
    shape = tensors.matrix(data, "I8")
    tensors.check(name, ("F32",), shape[:1])
    parts = {"data": data, "scales": name}
    if f"{module}.weight_format" in tensors.places:  # 0: rows one after another
        parts["format"] = f"{module}.weight_format"
        tensors.check(parts["format"], ("U8",), (), (1,))
    return data, shape, parts


def _bnb4(tensors: _Tensors, name: str) -> Found | None:
    module, mark, kind = name.partition(_STATE)
    if not mark:
        return None
    weight = f"{module}.weight"
    place = tensors.places[name]
    path = tensors.folder / place.file
    with open(path, "rb") as file:
        file.seek(place.offset)
        data = file.read(min(place.length, _STATE_BYTES))
    try:
        state = BlockState.parse(data)
    except ValueError as error:
        raise InputError(
            f"{path}: tensor {shorten(name)}: expected JSON with shape and blocksize, found {shorten(str(error))}; "
            f"download this file again"
        ) from None
    count = math.prod(state.shape)
    parts = {"data": tensors.beside(name, weight), "state": name}
    parts |= {part: tensors.beside(name, f"{weight}.{suffix}") for part, suffix in _bnb4_parts(state)}
    words = -(-count // 2)
    tensors.check(weight, ("U8",), (words, 1), (1, words), (words,))
    tensors.check(parts["table"], ("F32",), (16,))
    blocks = -(-count // state.block_size)
    if state.nested is None:
        tensors.check(parts["scales"], ("F32",), (blocks,))
    else:
        tensors.check(parts["scales"], ("U8",), (blocks,))
        tensors.check(parts["nested_table"], ("F32",), (256,))
        tensors.check(parts["nested_scales"], ("F32",), (-(-blocks // state.nested[0]),))
    return weight, state.shape, parts


def _bnb4_parts(state: BlockState) -> Iterator[tuple[str, str]]:
    yield from (("table", "quant_map"), ("scales", "absmax"))
    if state.nested is not None:
        yield from (("nested_table", "nested_quant_map"), ("nested_scales", "nested_absmax"))
