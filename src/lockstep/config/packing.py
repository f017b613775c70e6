"""The packing of a checkpoint's weights that are quantised already.

The `quantization_config` of its config.json says how they are packed, as safetensors files of the hub have them.

Three families of layouts hold integers. A weight is `(integer - zero point) * scale`, with a scale and a zero point for
each group of a row:

- GPTQ: `qweight` int32 [in_features * bits / 32, out_features], `scales` [num_groups, out_features], `qzeros` int32
  [num_groups, out_features * bits / 32], `g_idx` int32 [in_features]. Numbers of a word count from its low bits. Zero
  points are stored one lower in format `gptq`, as they are in `gptq_v2`.
- AWQ, version gemm: `qweight` int32 [in_features, out_features / 8], `qzeros` int32 [num_groups, out_features / 8],
  `scales` [num_groups, out_features]; the eight numbers of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7.
- compressed-tensors: `weight_packed` int32 [out_features, in_features * bits / 32] (pack-quantized) or `weight` int8
  (int-quantized, naive-quantized), both signed, `weight_scale` [out_features, num_groups]; where they are not
  symmetric `weight_zero_point`, as signed: int32 [out_features * bits / 32 (rounded up), num_groups], or int8
  [out_features, num_groups].

GPTQ with activation order (`desc_act`) has groups of columns that lie apart, as `g_idx` says. The others are codes, and
read as the numbers that they encode; those of mxfp4 are bound as they are in w4a16:

- fp8: `weight` e4m3 [out_features, in_features], times `weight_scale_inv` or `weight_scale`: one for the weight, for
  each row, or for each block of `weight_block_size` (`block_structure`).
- nvfp4: two e2m1 a byte, the first in the low half, [out_features, in_features / 2], with `weight_scale` e4m3
  [out_features, in_features / 16] and a scale of the weight: compressed-tensors has `weight_packed` and divides by
  `weight_global_scale`, modelopt has `weight` and multiplies by `weight_scale_2`.
- mxfp4 (GPT-OSS's experts): two e2m1 a byte, the first in the low half, `<name>_blocks` [num_experts, out_features,
  in_features / 32, 16] times two to the power of `<name>_scales` (e8m0, a byte) [num_experts, out_features,
  in_features / 32]. The model has the stack `<name>` as [num_experts, in_features, out_features].
- bitsandbytes: places in a table of 16 (`weight.quant_map`), two a byte, the first in the high half, as one row, with
  `weight.absmax` for each block of them, itself kept so in 8 bits as a rule; or `weight` int8 with `SCB` / 127 a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.artifacts.document import ValidationError
from lockstep.artifacts.dtypes import GROUP_SIZES, QUANTIZATIONS, is_fp8
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.errors import InputError

KEY = "quantization_config"
_BITS = (4, 8)
_PLAIN_INT8 = ("int-quantized", "naive-quantized")
INTEGERS = ("gptq", "gptq_v2", "awq", "packed", "int8")  # layouts; others are codes of numbers
MXFP4 = "mxfp4"
MXFP4_GROUP = 32
# {format of compressed-tensors: bits, strategies and group sizes of its weights of type float}.
_FP8_STRATEGIES = (8, ("tensor", "channel", "block"), (None,))
_FLOAT_STYLES: dict[str, tuple[int, tuple[str, ...], tuple[int | None, ...]]] = {
    "float-quantized": _FP8_STRATEGIES,
    "naive-quantized": _FP8_STRATEGIES,
    "nvfp4-pack-quantized": (4, ("tensor_group",), (16,)),
}
_ACTIVATIONS = "activations"
_CACHE = "KV caches"


@dataclass(frozen=True)
class Packing:
    """The layout of a checkpoint's packed weights.

    layout: "gptq", "gptq_v2", "awq", "packed" or "int8" (of compressed-tensors), or of codes "fp8", "mxfp4", "nvfp4",
    "modelopt_nvfp4", "bnb4" or "bnb8". group_size: of the checkpoint; None: one scale a row. zero_points: whether they
    may be others than the middle. ordered: whether groups are of columns in another order. block: [rows, columns] that
    share a scale of fp8. ignored: features of config.json that are not computed here. assumed: a note on a missing key.
    """

    layout: str
    bits: int
    group_size: int | None = None
    zero_points: bool = False
    ordered: bool = False
    block: tuple[int, int] | None = None
    ignored: str = field(default="", compare=False)
    assumed: str = field(default="", compare=False)

    @property
    def stays(self) -> bool:
        """Return whether graphs of w8a16 and w4a16 take the stored tensors; else weights are dequantised."""
        return self.layout in (*INTEGERS, MXFP4)

    @property
    def beyond_integers(self) -> str:
        """Return in words the inputs of quantised graphs besides integers and scales; empty without others."""
        if self.layout == MXFP4:
            return "codes of MXFP4"
        if self.zero_points:
            return "zero points of the weights' own"
        if self.ordered:
            return "activation order (desc_act)"
        return ""

    def described(self) -> str:
        """Return a note for the user on how weights are read; empty without one."""
        parts = list[str]()
        if not self.stays:
            parts.append(f"weights packed as {self.layout} are read as the numbers that they encode")
        if self.ignored:
            parts.append(f"{self.ignored}, which config.json asks for, are not quantised")
        if self.layout == "fp8" and self.block is None:
            parts.append("w8a8-fp8 keeps weights, and quantises activations")
        if self.assumed:
            parts.append(self.assumed)
        return "; ".join(parts)


def largest_group(size: int) -> int | None:
    """Return the largest of our group sizes that divides a group of `size` numbers. None where none does."""
    return next((ours for ours in sorted(GROUP_SIZES, reverse=True) if size % ours == 0), None)


def check_precision(quantized: QuantizedTensors, precision: str, group_size: int | None, where: str) -> None:
    """Raise InputError where a config has another precision or group size than a quantised checkpoint.

    quantized: the tensors of the checkpoint `where`. group_size: None where the config has none.
    """
    bits = max(quantized.bits.values())
    if QUANTIZATIONS[precision].bits != bits or is_fp8(precision):
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
    return next(name for name, quantization in QUANTIZATIONS.items() if quantization.bits == bits)


def packing_of(config: Mapping[str, Any]) -> Packing | None:
    """Return how a config.json packs weights; None in floating point. Raises ValidationError for other layouts."""
    settings = config.get(KEY)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ValidationError(KEY, "an object", settings)
    method = settings.get("quant_method")
    if method == "compressed_tensors":  # another spelling
        method = "compressed-tensors"
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "modelopt": _modelopt,
        "bitsandbytes": _bitsandbytes,
        MXFP4: lambda _: Packing(MXFP4, 4, MXFP4_GROUP),
    }
    if method not in readers:
        expected = f"{', '.join(readers)}, or no quantization_config where the weights are in floating point"
        raise ValidationError(f"{KEY}.quant_method", expected, method)
    return readers[method](settings)


def _gptq(settings: Mapping[str, Any]) -> Packing:
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ValidationError(f"{KEY}.checkpoint_format", "gptq or gptq_v2", layout)
    # Marlin stores the words in another order.
    if settings.get("is_marlin_format"):
        raise ValidationError(f"{KEY}.is_marlin_format", "false", settings["is_marlin_format"])
    symmetric = settings.get("sym", True)
    if type(symmetric) is not bool:
        raise ValidationError(f"{KEY}.sym", "true or false", symmetric)
    size = _group_size(settings, "")
    # With one scale a row, or groups formed before the columns were sorted, the order of columns does not matter.
    ordered = settings.get("desc_act") is True and size is not None and settings.get("static_groups") is not True
    packing = Packing(layout, _bits(settings, "bits"), size, not symmetric, ordered)
    # gptq and gptq_v2 differ in their zero points alone, by which a file of one cannot be told from the other's.
    if symmetric or settings.get("checkpoint_format") or settings.get("format"):
        return packing
    assumed = f'{KEY} says no checkpoint_format: gptq is assumed; a file of gptq_v2 needs "gptq_v2" there'
    return replace(packing, assumed=assumed)


def _auto_round(settings: Mapping[str, Any]) -> Packing:
    packed = settings.get("packing_format") or settings.get("backend") or "auto_round:auto_gptq"
    allowed = {
        "auto_round:auto_gptq": _gptq,
        "auto_round:gptq": _gptq,
        "auto_round:auto_awq": _awq,
        "auto_round:awq": _awq,
    }
    if packed not in allowed:
        raise ValidationError(f"{KEY}.packing_format", " or ".join(allowed), packed)
    extra_config = settings.get("extra_config") or {}
    layers = [None]  # which is invalid, as `extra_config` is
    if isinstance(extra_config, Mapping):
        layers = list(extra_config.values())
    allowed_bits = (None, settings.get("bits"), 16, 32)
    if not all(isinstance(layer, Mapping) and layer.get("bits") in allowed_bits for layer in layers):
        raise ValidationError(f"{KEY}.extra_config", "layers of the same bits, or in floating point", extra_config)
    # The packing format has decided the layout, which the readers of GPTQ and AWQ take from these keys.
    return allowed[packed]({**settings, "checkpoint_format": None, "format": None, "version": None})


def _fp8(settings: Mapping[str, Any]) -> Packing:
    form = settings.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise ValidationError(f"{KEY}.fmt", "e4m3", form)
    return Packing("fp8", 8, block=_block(settings, "weight_block_size", ""), ignored=_ACTIVATIONS)


def _modelopt(settings: Mapping[str, Any]) -> Packing:
    algorithm = settings.get("quant_algo")
    if algorithm == "FP8":
        return Packing("fp8", 8, ignored=_ACTIVATIONS)
    if algorithm == "NVFP4":
        return Packing("modelopt_nvfp4", 4, ignored=_ACTIVATIONS)
    raise ValidationError(f"{KEY}.quant_algo", "FP8 or NVFP4", algorithm)


def _bitsandbytes(settings: Mapping[str, Any]) -> Packing:
    # transformers keeps the flag in an attribute with an underscore, and files have either name.
    if settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        return Packing("bnb4", 4)
    if settings.get("load_in_8bit", settings.get("_load_in_8bit")):
        return Packing("bnb8", 8, ignored=_ACTIVATIONS)
    raise ValidationError(f"{KEY}.load_in_4bit", "true, or load_in_8bit", settings.get("load_in_4bit"))


def _block(settings: Mapping[str, Any], key: str, where: str) -> tuple[int, int] | None:
    sizes = settings.get(key)
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValidationError(_at(where, key), "two positive integers", sizes)
    return sizes[0], sizes[1]


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
    # Weights and activations are rotated, and the graphs here have no operation that undoes it.
    if settings.get("transform_config"):
        raise ValidationError(f"{KEY}.transform_config", "none", settings["transform_config"])
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ValidationError(f"{KEY}.sparsity_config", "none", sparsity)
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValidationError(f"{KEY}.config_groups", "an object of groups", groups)
    group_packings = {name: _compressed_group(settings, name, group) for name, group in sorted(groups.items())}
    first = next(iter(group_packings.values()))
    for name, packing in group_packings.items():
        if packing != first:
            raise ValidationError(
                f"{KEY}.config_groups.{name}", "groups of one format, of the same bits and group_size", packing
            )
    extra_keys = list[str]()
    if any(group.get("input_activations") for group in groups.values()):
        extra_keys.append(_ACTIVATIONS)
    if settings.get("kv_cache_scheme"):
        extra_keys.append(_CACHE)
    return replace(first, ignored=" and ".join(extra_keys))


def _compressed_group(settings: Mapping[str, Any], name: str, group: Any) -> Packing:
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValidationError(f"{KEY}.{where}", "an object with weights", group)
    if group.get("output_activations") is not None:
        expected = "null, for activations are not quantised here"
        raise ValidationError(f"{KEY}.{where}.output_activations", expected, group["output_activations"])
    weights = group["weights"]
    where = f"{where}.weights"
    style = group.get("format") or settings.get("format")
    if style in _FLOAT_STYLES and weights.get("type") == "float":
        return _compressed_floats(weights, where, style)
    if style not in ("pack-quantized", *_PLAIN_INT8):
        known_styles = ("pack-quantized", *_PLAIN_INT8, "float-quantized", "nvfp4-pack-quantized")
        raise ValidationError(f"{KEY}.format", ", ".join(known_styles), style)
    allowed: dict[str, tuple[Any, ...]] = {
        "type": ("int", None),
        "symmetric": (True, False, None),
        "dynamic": (False, None),
        # With "group" the columns of a group are not contiguous.
        "actorder": (None, False, "weight", "static"),
    }
    for key, choices in allowed.items():
        if weights.get(key) not in choices:
            raise ValidationError(f"{KEY}.{where}.{key}", " or ".join(map(str, choices)), weights[key])
    strategy = weights.get("strategy")
    if not strategy:
        strategy = "group" if weights.get("group_size") else "channel"
    if strategy not in ("group", "channel"):
        raise ValidationError(f"{KEY}.{where}.strategy", "group or channel", strategy)
    bits = _bits(weights, "num_bits", where)
    if style in _PLAIN_INT8 and bits != 8:
        raise ValidationError(f"{KEY}.{where}.num_bits", f"8 with {style}", bits)
    group_size = None
    if strategy == "group":
        group_size = _group_size(weights, where)
    layout = "int8" if style in _PLAIN_INT8 else "packed"
    return Packing(layout, bits, group_size, zero_points=weights.get("symmetric") is False)


def _compressed_floats(weights: Mapping[str, Any], where: str, style: str) -> Packing:
    """Return the layout of weights of type float: fp8, or nvfp4 in groups of 16."""
    bits, strategies, size = _FLOAT_STYLES[style]
    allowed = {"num_bits": (bits,), "strategy": strategies, "group_size": size, "symmetric": (True, None)}
    for key, choices in allowed.items():
        if weights.get(key) not in choices:
            raise ValidationError(f"{KEY}.{where}.{key}", " or ".join(map(str, choices)), weights.get(key))
    if bits == 4:
        return Packing("nvfp4", 4)
    if weights["strategy"] != "block":
        return Packing("fp8", 8)
    return Packing("fp8", 8, block=_block(weights, "block_structure", where))


def _bits(settings: Mapping[str, Any], key: str, where: str = "") -> int:
    bits = settings.get(key)
    if type(bits) is not int or bits not in _BITS:
        raise ValidationError(_at(where, key), " or ".join(map(str, _BITS)), bits)
    return bits


def _group_size(settings: Mapping[str, Any], where: str) -> int | None:
    # AutoAWQ writes q_group_size. -1 is one scale a row.
    size = settings.get("group_size", settings.get("q_group_size"))
    if size == -1 and type(size) is int:
        return None
    if type(size) is not int or size < 1 or largest_group(size) is None:
        raise ValidationError(_at(where, "group_size"), f"-1, or a multiple of {min(GROUP_SIZES)}", size)
    return size


def _at(where: str, key: str) -> str:
    return ".".join(filter(None, (KEY, where, key)))
