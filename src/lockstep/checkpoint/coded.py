"""Find the weights of a checkpoint that are stored as codes: fp8, mxfp4, nvfp4, and bitsandbytes' of 4 and 8 bits.

In: the packing that config.json names, and the tensors' places. Out: of each weight its shape and its stored tensors,
or one line for a tensor that is absent, of another shape or type. Layouts: `config.packing`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
_STATE_INFIX = ".weight.quant_state.bitsandbytes__"  # followed by nf4 or fp4
_MAX_STATE_BYTES = 1 << 16
CodedWeight = tuple[str, tuple[int, ...], dict[str, str]]  # (weight, its shape, {role: tensor})


@dataclass(frozen=True)
class BlockState:
    """The settings of bitsandbytes for a weight of 4 bits, stored as JSON in a tensor.

    block_size: codes that share an absmax. nested: (block size, offset) of absmax where it is stored in 8 bits.
    """

    shape: tuple[int, int]
    block_size: int
    nested: tuple[int, float] | None

    @classmethod
    def parse(cls, data: bytes) -> BlockState:
        """Parse a quant_state. Raises ValueError for invalid ones."""
        nested = None
        try:
            state = json.loads(data)
            rows, columns = state["shape"]
            size = state["blocksize"]
            if "nested_offset" in state:
                nested = (state["nested_blocksize"], float(state["nested_offset"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no {error}") from None
        sizes = [rows, columns, size]
        offset = 0.0
        if nested is not None:
            offset = nested[1]
            sizes.append(nested[0])
        if any(type(number) is not int or number < 1 for number in sizes) or not math.isfinite(offset):
            raise ValueError(f"{sizes}")
        return cls((rows, columns), size, nested)


def coded_weights(
    packing: Packing, tensors: Mapping[str, TensorPlace], folder: Path
) -> dict[str, tuple[tuple[int, ...], dict[str, str]]]:
    """Find the weights stored as codes: {name of the weight: (its shape, its tensors by role)}.

    Raises InputError, naming a file of `folder`, for parts that are absent or do not fit together.
    """
    finders = {"fp8": _fp8, MXFP4: _mxfp4, "bnb4": _bnb4, "bnb8": _bnb8}
    find = finders.get(packing.layout, _nvfp4)
    stored = StoredTensors(tensors, folder, packing)
    weights = filter(None, (find(stored, name) for name in tensors))
    return {name: (shape, parts) for name, shape, parts in sorted(weights)}


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a folder, with checks."""

    places: Mapping[str, TensorPlace]
    folder: Path
    packing: Packing

    def first_of(self, names: Sequence[str], sibling: str) -> str:
        """Return the first of `names` that exists; sibling: a part of the same weight. Raises InputError for none."""
        for name in names:
            if name in self.places:
                return name
        raise InputError(
            f"{self.folder / self.places[sibling].file}: expected tensor {shorten(names[0])} for {shorten(sibling)},"
            f" found none; download this checkpoint again"
        )

    def check(self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> None:
        place = self.places[name]
        if place.dtype not in dtypes or place.shape not in shapes:
            self.refuse(name, f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}")

    def matrix(self, name: str, *dtypes: str, multiple: int = 1) -> tuple[int, int]:
        """Return rows and columns of a tensor that must be a matrix, of a multiple of `multiple` columns."""
        place = self.places[name]
        expected = f"{' or '.join(dtypes)} of two dimensions"
        if multiple > 1:
            expected += f", of {multiple}s"
        if place.dtype not in dtypes or len(place.shape) != 2 or 0 in place.shape or place.shape[1] % multiple:
            self.refuse(name, expected)
        return place.shape[0], place.shape[1]

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise InputError for a part of a packed weight that contradicts config.json."""
        place = self.places[name]
        raise InputError(
            f"{self.folder / place.file}: tensor {shorten(name)}: expected {expected}, found {place.dtype} "
            f"{list(place.shape)}; does config.json (quantization_config) belong to these weights?"
        )


def _fp8(tensors: StoredTensors, name: str) -> CodedWeight | None:
    module, _, suffix = name.rpartition(".")
    if suffix != "weight" or tensors.places[name].dtype != FP8:
        return None
    scales = tensors.first_of([f"{module}.weight_scale_inv", f"{module}.weight_scale"], name)
    rows, columns = tensors.matrix(name, FP8)
    if tensors.packing.block is None:  # a scale for each row, or one for all
        tensors.check(scales, _SCALES, (rows, 1), (rows,), (1, 1), (1,), ())
    else:
        block_rows, block_columns = tensors.packing.block
        num_blocks = (-(-rows // block_rows), -(-columns // block_columns))
        tensors.check(scales, (*_SCALES, "F8_E8M0"), num_blocks)
    return name, (rows, columns), {"data": name, "scales": scales}


def _mxfp4(tensors: StoredTensors, name: str) -> CodedWeight | None:
    if not name.endswith("_blocks"):
        return None
    weight = name.removesuffix("_blocks")
    place = tensors.places[name]
    scales = tensors.first_of([f"{weight}_scales"], name)
    if place.dtype != "U8" or len(place.shape) != 4 or place.shape[3] != MXFP4_GROUP // 2 or 0 in place.shape:
        tensors.refuse(name, f"U8 of four dimensions, the last of {MXFP4_GROUP // 2}")
    experts, rows, groups, _ = place.shape
    tensors.check(scales, ("U8",), (experts, rows, groups))
    return weight, (experts, groups * MXFP4_GROUP, rows), {"data": name, "scales": scales}


def _nvfp4(tensors: StoredTensors, name: str) -> CodedWeight | None:
    module, _, suffix = name.rpartition(".")
    if suffix != "weight_scale":
        return None
    # modelopt and compressed-tensors store the same layout under different names.
    suffixes = ("weight_packed", "weight_global_scale")
    if tensors.packing.layout == "modelopt_nvfp4":
        suffixes = ("weight", "weight_scale_2")
    data, tensor_scale = (tensors.first_of([f"{module}.{suffix}"], name) for suffix in suffixes)
    rows, num_bytes = tensors.matrix(data, "U8", multiple=NVFP4_GROUP // 2)  # two numbers a byte
    tensors.check(name, (FP8,), (rows, 2 * num_bytes // NVFP4_GROUP))
    tensors.check(tensor_scale, ("F32",), (1,), ())
    return f"{module}.weight", (rows, 2 * num_bytes), {"data": data, "scales": name, "whole": tensor_scale}


def _bnb8(tensors: StoredTensors, name: str) -> CodedWeight | None:
    module, _, suffix = name.rpartition(".")
    if suffix != "SCB":
        return None
    data = tensors.first_of([f"{module}.weight"], name)
    shape = tensors.matrix(data, "I8")
    tensors.check(name, ("F32",), shape[:1])
    parts = {"data": data, "scales": name}
    if f"{module}.weight_format" in tensors.places:  # 0: rows one after another
        parts["format"] = f"{module}.weight_format"
        tensors.check(parts["format"], ("U8",), (), (1,))
    return data, shape, parts


def _bnb4(tensors: StoredTensors, name: str) -> CodedWeight | None:
    module, infix, _ = name.partition(_STATE_INFIX)
    if not infix:
        return None
    weight = f"{module}.weight"
    place = tensors.places[name]
    path = tensors.folder / place.file
    with open(path, "rb") as file:
        file.seek(place.offset)
        data = file.read(min(place.length, _MAX_STATE_BYTES))
    try:
        state = BlockState.parse(data)
    except ValueError as error:
        raise InputError(
            f"{path}: tensor {shorten(name)}: expected JSON with shape and blocksize, found {shorten(str(error))}; "
            f"download this file again"
        ) from None
    # Two codes a byte, in one column; a scale for each block of numbers, which may itself be quantized (nested).
    count = math.prod(state.shape)
    suffixes = {"table": "quant_map", "scales": "absmax"}
    if state.nested is not None:
        suffixes |= {"nested_table": "nested_quant_map", "nested_scales": "nested_absmax"}
    parts = {"data": tensors.first_of([weight], name), "state": name}
    parts |= {part: tensors.first_of([f"{weight}.{suffix}"], name) for part, suffix in suffixes.items()}
    num_bytes = -(-count // 2)
    tensors.check(weight, ("U8",), (num_bytes, 1), (1, num_bytes), (num_bytes,))
    tensors.check(parts["table"], ("F32",), (16,))
    blocks = -(-count // state.block_size)
    if state.nested is None:
        tensors.check(parts["scales"], ("F32",), (blocks,))
    else:
        tensors.check(parts["scales"], ("U8",), (blocks,))
        tensors.check(parts["nested_table"], ("F32",), (256,))
        tensors.check(parts["nested_scales"], ("F32",), (-(-blocks // state.nested[0]),))
    return weight, state.shape, parts
