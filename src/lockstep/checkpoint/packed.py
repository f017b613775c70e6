"""Find the weights of a checkpoint that are quantised already.

In: how config.json says that they are packed, and the tensors' places. Out: each packed weight with the tensors that it
is kept as, or one line for what is absent, of another shape or type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.dtypes import FLOAT_DTYPES, GROUP_SIZES
from lockstep.artifacts.places import TensorPlace
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.checkpoint.coded import coded_weights, refuse
from lockstep.checkpoint.source_files import present, shorten
from lockstep.config.packing import MXFP4, Packing, largest_group
from lockstep.errors import InputError

_INTS = ("I32", "U32")
_GPTQ = {"data": "qweight", "scales": "scales", "zero_points": "qzeros"}
_ROLES = {
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": _GPTQ,
    "packed": {"data": "weight_packed", "scales": "weight_scale", "shape": "weight_shape"},
    "int8": {"data": "weight", "scales": "weight_scale"},
}
_ZERO_POINTS = {"zero_points": "weight_zero_point"}  # of these two, where they have some
_OPTIONAL = {"gptq": {"order": "g_idx"}, "gptq_v2": {"order": "g_idx"}}
# Files of their own in which AutoGPTQ, AutoAWQ and modelopt left what belongs into config.json; its quant_method.
_CONFIG_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# What speaks of a layout that config.json does not.
_REFUSED = {"weight_zero_point": "symmetric", "weight_g_idx": "actorder", "weight_global_scale": "num_bits"}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out_features, in_features] that the checkpoint holds packed, or a stack of them as the model has it.

    place: of its integers or codes. parts: names of the tensors that it is kept as, by role: data, scales, and as the
    layout has them zero_points, order, shape and those of `checkpoint.coded`.
    """

    shape: tuple[int, ...]
    place: TensorPlace
    parts: Mapping[str, str]

    @property
    def dequantized(self) -> TensorPlace:
        """Return the weight as a tensor of floats, for shapes; no bytes lie there."""
        return TensorPlace(self.place.file, 0, 4 * math.prod(self.shape), "F32", self.shape)


def packed_weights(
    packing: Packing | None, tensors: Mapping[str, TensorPlace], folder: Path
) -> dict[str, PackedWeight]:
    """Find the packed weights: {name of the weight: what it is kept as}.

    Sorted; empty of a model in floating point. Raises InputError, naming a file of `folder`, for parts that are absent
    or do not fit together.
    """
    if packing is None:
        return {}
    found = (
        _integers(packing, tensors, folder)
        if packing.layout in _ROLES
        else {
            name: PackedWeight(shape, tensors[parts["data"]], parts)
            for name, (shape, parts) in coded_weights(packing, tensors, folder).items()
        }
    )
    if not found:
        raise InputError(
            f"{folder}: expected weights packed as {packing.layout} (quantization_config in config.json), found none; "
            f"take the key out where they are in floating point"
        )
    for name, weight in found.items():
        if name in tensors and name not in weight.parts.values():
            raise InputError(
                f"{folder / tensors[name].file}: expected {shorten(name)} packed or in floating point, found both; "
                f"use a checkpoint that was saved once"
            )
    return found


def _integers(packing: Packing, tensors: Mapping[str, TensorPlace], folder: Path) -> dict[str, PackedWeight]:
    by_row = packing.layout in ("packed", "int8")
    roles = _ROLES[packing.layout] | (_ZERO_POINTS if by_row and packing.zero_points else {})
    optional = _OPTIONAL.get(packing.layout, {})
    if by_row:
        _refuse_others(packing, tensors, folder)
    own = {suffix for suffix in (*roles.values(), *optional.values()) if suffix != "weight"}
    modules: dict[str, str] = {}  # the first tensor that is found of each
    for name in tensors:
        stem, _, suffix = name.rpartition(".")
        if suffix in own:
            modules.setdefault(stem, name)
    found = {}
    for module, first in sorted(modules.items()):
        parts = {role: f"{module}.{suffix}" for role, suffix in roles.items()}
        for name in parts.values():
            if name not in tensors:
                raise InputError(
                    f"{folder / tensors[first].file}: expected tensor {shorten(name)} beside {shorten(first)}, "
                    f"found none; download this checkpoint again"
                )
        parts |= {role: f"{module}.{suffix}" for role, suffix in optional.items() if f"{module}.{suffix}" in tensors}
        found[f"{module}.weight"] = _weight(packing, parts, tensors, folder)
    return found


def check_unpacked(folder: Path, tensors: Mapping[str, TensorPlace]) -> None:
    """Raise InputError for packed weights whose config.json does not say how, where another file does."""
    for file, method in _CONFIG_FILES.items():
        packed = (name for name, place in sorted(tensors.items()) if _is_packed(name, place))
        if present(folder / file) and (name := next(packed, None)):
            raise InputError(
                f"{folder / 'config.json'}: expected quantization_config, for {shorten(name)} is packed, found it in "
                f"{file} alone; add that file's settings there as quantization_config, with quant_method {method}"
            )


def _is_packed(name: str, place: TensorPlace) -> bool:
    suffix = name.rpartition(".")[2]
    return suffix in ("qweight", "weight_packed") or (suffix == "weight" and place.dtype not in FLOAT_DTYPES)


def unpacked_places(tensors: Mapping[str, TensorPlace], packed: Mapping[str, PackedWeight]) -> dict[str, TensorPlace]:
    """Return the tensors as a model in floating point has them.

    Packed weights are one each, as floats.
    """
    parts = {name for weight in packed.values() for name in weight.parts.values()}
    whole = {name: place for name, place in tensors.items() if name not in parts}
    return whole | {name: weight.dequantized for name, weight in packed.items()}


def quantized_tensors(packing: Packing, packed: Mapping[str, PackedWeight], folder: Path) -> QuantizedTensors:
    """Return what graphs of packed weights take.

    Of groups that are longer than ours, ours are the largest that divide them. Raises InputError for rows that no group
    size divides.
    """
    columns = math.gcd(*(weight.shape[1] for weight in packed.values()))
    group_size = largest_group(packing.group_size or columns)
    if group_size is None:
        raise InputError(
            f"{folder}: expected packed weights whose rows are a multiple of {min(GROUP_SIZES)} numbers, found rows of "
            f"{min(weight.shape[1] for weight in packed.values())}; use the checkpoint in floating point"
        )
    bits = dict.fromkeys(packed, packing.bits)
    is_mxfp4 = packing.layout == MXFP4
    return QuantizedTensors(group_size, bits, packing.zero_points, packing.ordered, is_mxfp4)


def _refuse_others(packing: Packing, tensors: Mapping[str, TensorPlace], folder: Path) -> None:
    for name, place in sorted(tensors.items()):
        key = _REFUSED.get(name.rpartition(".")[2])
        if key is not None and not (key == "symmetric" and packing.zero_points):
            raise InputError(
                f"{folder / place.file}: tensor {shorten(name)}: expected none of this name, as {key} in config.json "
                f"says; does config.json (quantization_config) belong to these weights?"
            )


def _weight(
    packing: Packing, parts: Mapping[str, str], tensors: Mapping[str, TensorPlace], folder: Path
) -> PackedWeight:
    place = tensors[parts["data"]]
    bits = packing.bits
    word = 32 // bits
    by_row = packing.layout in ("packed", "int8")
    dtypes = ("I8",) if packing.layout == "int8" else _INTS
    if place.dtype not in dtypes or len(place.shape) != 2 or 0 in place.shape:
        refuse(parts["data"], place, folder, f"{' or '.join(dtypes)} of two dimensions")
    first, second = place.shape
    if packing.layout == "int8":
        rows = first
        columns = second
    elif by_row:
        rows = first
        columns = second * word
    elif packing.layout == "awq":
        rows = second * word
        columns = first
    else:
        rows = second
        columns = first * word
    groups, left = divmod(columns, packing.group_size or columns)
    if left or (rows % word and not by_row):
        expected = f"rows of a multiple of {packing.group_size} numbers, as group_size in config.json says"
        refuse(parts["data"], place, folder, expected if left else f"a multiple of {word} rows")
    expected_shapes: dict[str, tuple[Iterable[str], tuple[int, ...]]] = {
        "scales": (FLOAT_DTYPES, (rows, groups) if by_row else (groups, rows)),
        "zero_points": (dtypes, _zero_points_shape(packing, rows, groups)),
        "order": (_INTS, (columns,)),
        "shape": ((*_INTS, "I64"), (2,)),
    }
    for role, name in parts.items():
        if role in expected_shapes:
            allowed, wanted = expected_shapes[role]
            if tensors[name].dtype not in allowed or tensors[name].shape != wanted:
                refuse(name, tensors[name], folder, f"{' or '.join(allowed)} {list(wanted)}")
    return PackedWeight((rows, columns), place, parts)


def _zero_points_shape(packing: Packing, rows: int, groups: int) -> tuple[int, int]:
    if packing.layout == "int8":
        return rows, groups
    words = -(-rows * packing.bits // 32)
    return (words, groups) if packing.layout == "packed" else (groups, words)
