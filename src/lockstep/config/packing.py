"""The packing of a checkpoint's weights that are quantised already.

The `quantization_config` of its config.json says how they are packed. There are three families of layouts, as
safetensors files of the hub have them. A weight is `(integer - zero point) * scale`, with a scale and a zero point for
each group of a row:

- GPTQ: `qweight` int32 [in_features * bits / 32, out_features], `scales` [num_groups, out_features], `qzeros` int32
  [num_groups, out_features * bits / 32], `g_idx` int32 [in_features]. Numbers of a word count from its low bits. Zero
  points are stored one lower in format `gptq`, as they are in `gptq_v2`.
- AWQ, version gemm: `qweight` int32 [in_features, out_features / 8], `qzeros` int32 [num_groups, out_features / 8],
  `scales` [num_groups, out_features]; the eight numbers of a word stand in the order 0, 2, 4, 6, 1, 3, 5, 7.
- compressed-tensors: `weight_packed` int32 [out_features, in_features * bits / 32] (pack-quantized) or `weight` int8
  (int-quantized, naive-quantized), both signed, `weight_scale` [out_features, num_groups]; where they are not
  symmetric `weight_zero_point`, as signed: int32 [out_features * bits / 32 (rounded up), num_groups], or int8
  [out_features, num_groups].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts.document import ValidationError
from lockstep.artifacts.dtypes import GROUP_SIZES, QUANTIZATIONS
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.errors import InputError

KEY = "quantization_config"
_BITS = (4, 8)
_PLAIN_INT8 = ("int-quantized", "naive-quantized")


@dataclass(frozen=True)
class Packing:
    """The layout of a checkpoint's packed weights.

    layout: "gptq", "gptq_v2", "awq", "packed" or "int8" (of compressed-tensors). group_size: of the checkpoint; None:
    one scale a row. zero_points: whether they may be others than the middle.
    """

    layout: str
    bits: int
    group_size: int | None
    zero_points: bool


def largest_group(size: int) -> int | None:
    """Return the largest of our group sizes that divides a group of `size` numbers.

    None where none does.
    """
    return next((ours for ours in sorted(GROUP_SIZES, reverse=True) if size % ours == 0), None)


def check_precision(quantized: QuantizedTensors, precision: str, group_size: int | None, where: str) -> None:
    """Raise InputError where a config asks for other quantisation than a checkpoint's.

    Another precision or group size. quantized: what is quantised already in the checkpoint `where`. group_size: None
    where the config names none.
    """
    bits = max(quantized.bits.values())
    if QUANTIZATIONS[precision].bits != bits:
        raise InputError(
            f"{where}: expected precision {precision_of(bits)}, for the weights are quantised to {bits} bits already, "
            f"found {precision}; choose that one, or one in floating point"
        )
    if group_size not in (None, quantized.group_size):
        raise InputError(
            f"group_size: expected {quantized.group_size}, as the checkpoint {where} is quantised, found {group_size}; "
            f"leave it out"
        )


def precision_of(bits: int) -> str:
    """Return the precision of weights of so many bits."""
    return next(name for name, each in QUANTIZATIONS.items() if each.bits == bits)


def packing_of(config: Mapping[str, Any]) -> Packing | None:
    """Return how a config.json says that weights are packed.

    None of a model in floating point. Raises ValidationError for what cannot be read.
    """
    settings = config.get(KEY)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ValidationError(KEY, "an object", settings)
    method = settings.get("quant_method")
    if method == "gptq":
        return _gptq(settings)
    if method == "awq":
        return _awq(settings)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(settings)
    expected = "gptq, awq or compressed-tensors, or no quantization_config where the weights are in floating point"
    raise ValidationError(f"{KEY}.quant_method", expected, method)


def _gptq(settings: Mapping[str, Any]) -> Packing:
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ValidationError(f"{KEY}.checkpoint_format", "gptq or gptq_v2", layout)
    if settings.get("is_marlin_format"):
        raise ValidationError(f"{KEY}.is_marlin_format", "false", settings["is_marlin_format"])
    symmetric = settings.get("sym", True)
    if type(symmetric) is not bool:
        raise ValidationError(f"{KEY}.sym", "true or false", symmetric)
    return Packing(layout, _bits(settings, "bits"), _group_size(settings, ""), not symmetric)


def _awq(settings: Mapping[str, Any]) -> Packing:
    version = settings.get("version") or settings.get("checkpoint_format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ValidationError(f"{KEY}.version", "gemm", version)
    if settings.get("zero_point", True) is not True:
        raise ValidationError(f"{KEY}.zero_point", "true", settings["zero_point"])
    if settings.get("bits", settings.get("w_bit")) != 4:
        raise ValidationError(f"{KEY}.bits", "4", settings.get("bits", settings.get("w_bit")))
    return Packing("awq", 4, _group_size(settings, ""), zero_points=True)


def _compressed(settings: Mapping[str, Any]) -> Packing:
    for key in ("kv_cache_scheme", "transform_config"):
        if settings.get(key):
            raise ValidationError(f"{KEY}.{key}", "none", settings[key])
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ValidationError(f"{KEY}.sparsity_config", "none", sparsity)
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValidationError(f"{KEY}.config_groups", "an object of groups", groups)
    found = {name: _compressed_group(settings, name, group) for name, group in sorted(groups.items())}
    first = next(iter(found.values()))
    for name, packing in found.items():
        if packing != first:
            raise ValidationError(
                f"{KEY}.config_groups.{name}", "groups of one format, of the same bits and group_size", packing
            )
    return first


def _compressed_group(settings: Mapping[str, Any], name: str, group: Any) -> Packing:
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValidationError(f"{KEY}.{where}", "an object with weights", group)
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            expected = "null, for activations are not quantised here"
            raise ValidationError(f"{KEY}.{where}.{key}", expected, group[key])
    weights, where = group["weights"], f"{where}.weights"
    style = group.get("format") or settings.get("format")
    if style not in ("pack-quantized", *_PLAIN_INT8):
        raise ValidationError(f"{KEY}.format", ", ".join(("pack-quantized", *_PLAIN_INT8)), style)
    known: dict[str, tuple[Any, ...]] = {
        "type": ("int", None),
        "symmetric": (True, False, None),
        "dynamic": (False, None),
    }
    for key, choices in {**known, "actorder": (None, False, "weight", "static")}.items():
        if weights.get(key) not in choices:
            raise ValidationError(f"{KEY}.{where}.{key}", " or ".join(map(str, choices)), weights[key])
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise ValidationError(f"{KEY}.{where}.strategy", "group or channel", strategy)
    bits = _bits(weights, "num_bits", where)
    if style in _PLAIN_INT8 and bits != 8:
        raise ValidationError(f"{KEY}.{where}.num_bits", f"8 with {style}", bits)
    group_size = _group_size(weights, where) if strategy == "group" else None
    layout = "int8" if style in _PLAIN_INT8 else "packed"
    return Packing(layout, bits, group_size, zero_points=weights.get("symmetric") is False)


def _bits(settings: Mapping[str, Any], key: str, where: str = "") -> int:
    bits = settings.get(key)
    if type(bits) is not int or bits not in _BITS:
        raise ValidationError(_at(where, key), " or ".join(map(str, _BITS)), bits)
    return bits


def _group_size(settings: Mapping[str, Any], where: str) -> int | None:
    size = settings.get("group_size", settings.get("q_group_size"))
    if size == -1 and type(size) is int:
        return None
    if type(size) is not int or size < 1 or largest_group(size) is None:
        raise ValidationError(_at(where, "group_size"), f"-1, or a multiple of {min(GROUP_SIZES)}", size)
    return size


def _at(where: str, key: str) -> str:
    return ".".join(filter(None, (KEY, where, key)))
