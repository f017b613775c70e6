"""Check the values of a model's `config.json`: the mapping in, errors out. No torch, no transformers.

Only rules of every decoder are checked: sizes are positive integers, epsilons and RoPE settings are finite numbers, and
the depth is within limits. transformers checks the rules of a model type, when the model is created (`export`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lockstep.artifacts.document import ValidationError
from lockstep.config.packing import KEY, packing_of

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_LISTS = ("layers_block_type", "layer_types")  # an entry a layer; Nemotron-H says its depth by nothing else
POSITION_KEYS = ("max_position_embeddings", "n_positions")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
TEXT_KEY = "text_config"
# How many numbers the rows of linear layers have, where the config says it by a key, or by a product of two.
_ROWS = (
    *HIDDEN_KEYS, "word_embed_proj_dim", "q_lora_rank", "kv_lora_rank", "moe_intermediate_size",
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip
_ROWS_OF_DENSE = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")  # mixtures may have no such layer
_HEADS = (
    ("linear_num_value_heads", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
)

# Eight times the deepest model that is published (126 layers). Each layer is a module of the traced model and an entry
# of the assembly: a billion of them would fill the memory before anything could be said about them.
MAX_LAYERS = 1024
# Sizes are int32 in engines.
MAX_SIZE = 2**31 - 1
# Thirty times the most experts of a layer that are published. Some classes make a module of each.
MAX_EXPERTS = 1 << 16
# Twelve times the longest context that is published (10 million tokens). Some models compute a table of all positions
# when they are made.
MAX_POSITIONS = 1 << 27

_SIZES = frozenset((
    *HIDDEN_KEYS, "vocab_size", "num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads",
    "num_kv_heads", "n_head_kv", "head_dim", "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner",
    "word_embed_proj_dim",
))  # fmt: skip
# What a class makes modules by, in the config and in those of encoders inside it.
_COUNTS = {re.compile(r"(.*_)?(layers?|depth)"): MAX_LAYERS, re.compile(r"(.*_)?experts"): MAX_EXPERTS}
_EPSILON = re.compile(r"(.*_)?eps(ilon)?")
_POSITIVE = frozenset((
    "rope_theta", "rotary_emb_base", "rope_local_base_freq", "global_rope_theta", "local_rope_theta",
    "partial_rotary_factor", "rotary_pct",
))  # fmt: skip
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_LENGTH = "original_max_position_embeddings"
# How transformers 5 writes a float that JSON lacks; older ones wrote `Infinity`. State-space models have bounds of time
# steps that are infinite, which means none.
_NOT_FINITE = "__float__"
_MAY_BE_INFINITE = re.compile(r"time_step.*")


def parse_json(text: str) -> Any:
    """Parse a file of a checkpoint, with the floats that JSON lacks as transformers 5 writes them."""
    return json.loads(text, parse_constant=lambda name: {_NOT_FINITE: name})


def parts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the mappings that describe the decoder: the config, and the `text_config` of a model of images too."""
    text = config.get(TEXT_KEY)
    if isinstance(text, Mapping):
        return config, text
    return (config,)


def first_chunk(settings: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield how many positions a decoder computes as its first ones, with the key that says so.

    Attention in chunks is causal attention within the first of them, and queries that are scaled in steps of
    `floor_scale` positions have a scale of one within the first.
    """
    if (chunk := chunk_size(settings.get)) is not None:
        yield chunk, "attention_chunk_size: tokens after it do not attend to those before"
    if scales_queries(settings.get) and settings["floor_scale"] > 1:
        yield settings["floor_scale"] - 1, "floor_scale: from there on queries are scaled"


def chunk_size(get: Callable[[str], Any]) -> int | None:
    """Return the size of the chunks of attention, None of a decoder without; get: the value of a setting, or None."""
    size = get("attention_chunk_size")
    kinds = get("layer_types") or ["chunked_attention"]
    if isinstance(size, int) and size > 0 and "chunked_attention" in kinds:
        return size
    return None


def scales_queries(get: Callable[[str], Any]) -> bool:
    """Return whether queries are scaled by their positions; get: as of `chunk_size`."""
    return bool(get("attn_temperature_tuning")) and isinstance(get("floor_scale"), int)


def setting(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the first of `keys` that is not null, in the config, then in its `text_config`; None without one."""
    for part in parts(config):
        for key in keys:
            if part.get(key) is not None:
                return part[key]
    return None


def linear_rows(config: Mapping[str, Any]) -> dict[str, int]:
    """Return {key of the config: number of in_features} of linear layers, those that the config has for certain."""
    # Only keys that certainly describe a linear layer: a wrong refusal is worse than a late one.
    decoder = parts(config)[-1]
    is_mixture = any(type(value) is int and value > 1 for key, value in decoder.items() if key.endswith("experts"))
    names = list(_ROWS)
    # LFM2 derives the size of its MLP from `block_ff_dim` when it adjusts it.
    if not is_mixture and not decoder.get("block_auto_adjust_ff_dim", "block_ff_dim" in decoder):
        names += _ROWS_OF_DENSE
    is_latent = decoder.get("kv_lora_rank") is not None
    products = [("num_attention_heads", "v_head_dim" if is_latent else "head_dim"), *_HEADS]
    rows = {name: decoder[name] for name in names if type(decoder.get(name)) is int}
    for count, size in products:
        if type(decoder.get(count)) is int and type(decoder.get(size)) is int:
            rows[f"{count} * {size}"] = decoder[count] * decoder[size]
    return rows


def depth(config: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the number of layers, and the key that says it; None where none does."""
    for part in parts(config):
        for key in (*DEPTH_KEYS, *_LAYER_LISTS):
            if (value := part.get(key)) is not None:
                if key in _LAYER_LISTS:
                    value = len(value)
                return value, key
    return None, ""


def ties_head(config: Mapping[str, Any]) -> bool | None:
    """Return whether a config, or a part of a wrapper's, ties the head to the embedding; None without the key."""
    flags = [part["tie_word_embeddings"] for part in parts(config) if part.get("tie_word_embeddings") is not None]
    if not flags:
        return None
    return any(flags)


def without_packing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model in floating point.

    It is what transformers is given, which would else look for the packages that read packed weights. Floats that JSON
    lacks are floats there, as transformers reads them from a file.
    """
    return {key: _with_floats(value) for key, value in config.items() if key != KEY}


def _with_floats(value: Any) -> Any:
    if isinstance(value, Mapping):
        if list(value) == [_NOT_FINITE]:
            return float(value[_NOT_FINITE])
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return value


def first_error(config: Mapping[str, Any]) -> ValidationError | None:
    """Return the error of the first value of a model's config that cannot be right, else None."""
    return next(_errors(config), None)


def _errors(config: Mapping[str, Any]) -> Iterator[ValidationError]:
    if not isinstance(config.get("text_config", {}), Mapping | None):
        yield ValidationError("text_config", "an object", config["text_config"])
    for part in parts(config):
        prefix = "" if part is config else "text_config."
        for key, value in part.items():
            if value is not None:
                yield from _value_errors(prefix + key, key, value)
    yield from _nested_errors(config)


def _value_errors(path: str, key: str, value: Any) -> Iterator[ValidationError]:
    if key in DEPTH_KEYS:
        if not _is_size(value, MAX_LAYERS):
            yield ValidationError(path, f"an integer from 1 to {MAX_LAYERS}", value)
    elif key in _LAYER_LISTS:
        if not isinstance(value, list) or not _is_size(len(value), MAX_LAYERS):
            yield ValidationError(path, f"a list of 1 to {MAX_LAYERS}", value)
    elif key in (*POSITION_KEYS, _ROPE_LENGTH):
        if not _is_size(value, MAX_POSITIONS):
            yield ValidationError(path, f"an integer from 1 to {MAX_POSITIONS}", value)
    elif key in _SIZES:
        # Some models have a list with the size of each layer.
        items = [value]
        if isinstance(value, list) and value:
            items = value
        if not all(_is_size(item, MAX_SIZE) for item in items):
            yield ValidationError(path, "a positive integer", value)
    elif _EPSILON.fullmatch(key):
        if not _is_finite(value) or value < 0:
            yield ValidationError(path, "a number of at least 0", value)
    elif key in _POSITIVE:
        if not _is_finite(value) or value <= 0:
            yield ValidationError(path, "a number above 0", value)
    elif key in _ROPE:
        yield from _rope_errors(path, value)
    elif key == KEY:
        yield from _packing_errors(path, key, value)


def _packing_errors(path: str, key: str, value: Any) -> Iterator[ValidationError]:
    """Yield the error of a quantization config whose layout is not known."""
    # `packing_of` reads the top level only: one in a text_config would be ignored, and the weights misread.
    if path != key:
        yield ValidationError(path, f"nothing, for {key} is at the top", value)
        return
    try:
        packing_of({key: value})
    except ValidationError as error:
        yield error


def _rope_errors(path: str, value: Any) -> Iterator[ValidationError]:
    """Check RoPE settings, the model's or an object of them for each layer type."""
    if not isinstance(value, Mapping):
        yield ValidationError(path, "an object", value)
        return
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _rope_errors(f"{path}.{key}", item)
        elif item is not None and key == _ROPE_LENGTH and not _is_size(item, MAX_POSITIONS):
            yield ValidationError(f"{path}.{key}", f"an integer from 1 to {MAX_POSITIONS}", item)
        elif item is not None and key in _POSITIVE | {"factor"} and (not _is_finite(item) or item <= 0):
            yield ValidationError(f"{path}.{key}", "a number above 0", item)


def _nested_errors(config: Mapping[str, Any]) -> Iterator[ValidationError]:
    """Yield an error for each infinite value, and for each number of modules that is too large to build."""
    # A list and no recursion: a config may be nested deeper than Python's stack.
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, Mapping):
            if _NOT_FINITE in value:
                yield ValidationError(path, "a finite value", value)
            for key, item in value.items():
                full_path = f"{path}.{key}".removeprefix(".")
                for pattern, limit in _COUNTS.items():
                    if type(item) is int and item > limit and pattern.fullmatch(key):
                        yield ValidationError(full_path, f"an integer of at most {limit}", item)
                if not _MAY_BE_INFINITE.fullmatch(key):
                    waiting.append((full_path, item))


def _is_size(value: Any, largest: int) -> bool:
    # `type` and not `isinstance`: JSON's true is an int in Python.
    return type(value) is int and 1 <= value <= largest


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
