"""Find the weights of a checkpoint that are quantised already.

In: the packing that config.json names, and the tensors' places. Out: each packed weight with its stored tensors, or one
line for a tensor that is absent, of another shape or type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.dtypes import FLOAT_DTYPES, GROUP_SIZES
from lockstep.artifacts.places import TensorPlace
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.checkpoint.coded import StoredTensors, coded_weights
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
_ZERO_POINTS = {"zero_points": "weight_zero_point"}  # of the layouts packed and int8, which may have them
_OPTIONAL = {"gptq": {"order": "g_idx"}, "gptq_v2": {"order": "g_idx"}}
# {file in which AutoGPTQ, AutoAWQ and modelopt write settings that belong into config.json: its quant_method}
_CONFIG_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# {suffix of a tensor that contradicts config.json: the key there}
_CONTRADICTIONS = {"weight_zero_point": "symmetric", "weight_g_idx": "actorder", "weight_global_scale": "num_bits"}


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight [out_features, in_features], or a stack of them in the model's shape.

    place: of its integers or codes. parts: names of its stored tensors, by role: data, scales, and depending on the
    layout zero_points, order, shape and those of `checkpoint.coded`.
    """

    shape: tuple[int, ...]
    place: TensorPlace
    parts: Mapping[str, str]

    @property
    def dequantized(self) -> TensorPlace:
        """Return the weight as a tensor of floats, for its shape; the offset is meaningless."""
        return TensorPlace(self.place.file, 0, 4 * math.prod(self.shape), "F32", self.shape)


def packed_weights(
    packing: Packing | None, tensors: Mapping[str, TensorPlace], folder: Path
) -> dict[str, PackedWeight]:
    """Find the packed weights {name: weight}, sorted; empty for a model in floating point.

    Raises InputError, naming a file of `folder`, for parts that are absent or do not fit together.
    """
    if packing is None:
        return {}
    if packing.layout in _ROLES:
        weights = _integer_weights(packing, tensors, folder)
    else:
        weights = {}
        for name, (shape, parts) in coded_weights(packing, tensors, folder).items():
            weights[name] = PackedWeight(shape, tensors[parts["data"]], parts)
    if not weights:
        raise InputError(
            f"{folder}: expected weights packed as {packing.layout} (quantization_config in config.json), found none; "
            f"take the key out where they are in floating point"
        )
    for name, weight in weights.items():
        if name in tensors and name not in weight.parts.values():
            raise InputError(
                f"{folder / tensors[name].file}: expected {shorten(name)} packed or in floating point, found both; "
                f"use a checkpoint that was saved once"
            )
    return weights


def _integer_weights(packing: Packing, tensors: Mapping[str, TensorPlace], folder: Path) -> dict[str, PackedWeight]:
    is_by_row = packing.layout in ("packed", "int8")
    roles = dict(_ROLES[packing.layout])
    if is_by_row:
        if packing.zero_points:
            roles |= _ZERO_POINTS
        _check_contradictions(packing, tensors, folder)
    optional = _OPTIONAL.get(packing.layout, {})
    # "weight" tells nothing: modules in floating point have one too.
    suffixes = {suffix for suffix in (*roles.values(), *optional.values()) if suffix != "weight"}
    first_tensors: dict[str, str] = {}  # {module: its first tensor}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        if suffix in suffixes:
            first_tensors.setdefault(module, name)
    stored = StoredTensors(tensors, folder, packing)
    weights = {}
    for module, first in sorted(first_tensors.items()):
        parts = {role: stored.first_of([f"{module}.{suffix}"], first) for role, suffix in roles.items()}
        parts |= {role: f"{module}.{suffix}" for role, suffix in optional.items() if f"{module}.{suffix}" in tensors}
        weights[f"{module}.weight"] = _weight(stored, parts)
    return weights


def check_unpacked(folder: Path, tensors: Mapping[str, TensorPlace]) -> None:
    """Raise InputError for packed weights whose packing is in another file than config.json."""
    for file, method in _CONFIG_FILES.items():
        if not present(folder / file):
            continue
        name = next((name for name, place in sorted(tensors.items()) if _is_packed(name, place)), None)
        if name is not None:
            raise InputError(
                f"{folder / 'config.json'}: expected quantization_config, for {shorten(name)} is packed, found it in "
                f"{file} alone; add that file's settings there as quantization_config, with quant_method {method}"
            )


def _is_packed(name: str, place: TensorPlace) -> bool:
    suffix = name.rpartition(".")[2]
    return suffix in ("qweight", "weight_packed") or (suffix == "weight" and place.dtype not in FLOAT_DTYPES)


def unpacked_places(tensors: Mapping[str, TensorPlace], packed: Mapping[str, PackedWeight]) -> dict[str, TensorPlace]:
    """Return the tensors of the model in floating point, in which each packed weight is one."""
    parts: set[str] = set()
    for weight in packed.values():
        parts.update(weight.parts.values())
    unpacked = {name: place for name, place in tensors.items() if name not in parts}
    return unpacked | {name: weight.dequantized for name, weight in packed.items()}


def quantized_tensors(packing: Packing, packed: Mapping[str, PackedWeight], folder: Path) -> QuantizedTensors:
    """Return the quantised tensors in the form that graphs need.

    Groups longer than the supported sizes are divided by the largest that fits. Raises InputError for rows that no
    group size divides.
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


def _check_contradictions(packing: Packing, tensors: Mapping[str, TensorPlace], folder: Path) -> None:
    for name, place in sorted(tensors.items()):
        key = _CONTRADICTIONS.get(name.rpartition(".")[2])
        if key is not None and not (key == "symmetric" and packing.zero_points):
            raise InputError(
                f"{folder / place.file}: tensor {shorten(name)}: expected none of this name, as {key} in config.json "
                f"says; does config.json (quantization_config) belong to these weights?"
            )


def _weight(stored: StoredTensors, parts: Mapping[str, str]) -> PackedWeight:
    packing = stored.packing
    data = parts["data"]
    word = 32 // packing.bits  # numbers in a word
    by_row = packing.layout in ("packed", "int8")
    dtypes: tuple[str, ...] = _INTS
    if packing.layout == "int8":
        dtypes = ("I8",)
    # GPTQ and AWQ store weights transposed. AWQ packs numbers of neighbouring outputs into a word, the others numbers
    # of neighbouring inputs.
    first, second = stored.matrix(data, *dtypes)
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
    groups, remainder = divmod(columns, packing.group_size or columns)
    if remainder:
        expected = f"rows of a multiple of {packing.group_size} numbers, as group_size in config.json says"
        stored.refuse(data, expected)
    if rows % word and not by_row:
        stored.refuse(data, f"a multiple of {word} rows")
    expected_forms: dict[str, tuple[Sequence[str], tuple[int, ...]]] = {
        "scales": (FLOAT_DTYPES, (rows, groups) if by_row else (groups, rows)),
        "zero_points": (dtypes, _zero_points_shape(packing, rows, groups)),
        "order": (_INTS, (columns,)),
        "shape": ((*_INTS, "I64"), (2,)),
    }
    for role, name in parts.items():
        if role in expected_forms:
            stored.check(name, *expected_forms[role])
    return PackedWeight((rows, columns), stored.places[data], parts)


def _zero_points_shape(packing: Packing, rows: int, groups: int) -> tuple[int, int]:
    if packing.layout == "int8":
        return rows, groups
    words = -(-rows * packing.bits // 32)
    if packing.layout == "packed":
        return words, groups
    return groups, words
