"""Small models of the same class and settings.

In: a config.json. Out: config.json mappings of smaller models.

Kept: the class, norms, biases, activations, caps, tied weights, rotary settings, head size, the sequence of layer
looks. Made small: depth, width, heads, experts, vocabulary, and windows that are wider than the longest
context of the parity check. Keys are told by their names, which transformers' models share, so no model needs code of
its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.export.language import NOT_PER_LAYER, build_config, language_config

WINDOW = 4096  # tokens: far.py looks at both sides of it
_VOCABULARY = 160
_SMALL_VOCABULARY = 512  # stays as it is, so that a model that is small already need not be traced a second time
_INTERMEDIATE = 96
_KV_HEADS = (2, 4)  # more than one, so that heads taken in a wrong order show; some classes want a multiple of four
# query heads for each key head: another number than those above, so that the two are not mistaken for each other
_GROUP = 3
_KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts|moe_num_experts|num_local_experts")
_EXPERTS_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_INNER = re.compile(r"intermediate_(size|dim)|ffn_dim|ffn_hidden_size|n_inner|d_ff$|mlp_dim|share_expert_dim")
_WINDOWS = re.compile(r"window(_size)?$|sliding_window_size|attention_chunk_size|local_attention$")


def small_configs(config: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Yield configs of the first `depth` layers, the smallest first, for a class that refuses one."""
    for kv_heads in _KV_HEADS:
        yield _small(config, depth, kv_heads, experts=True)
    for experts in (True, False):
        yield _small(config, depth, None, experts)


def shallow_config(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return the config of the first `depth` layers, with a small vocabulary and windows of at most WINDOW."""
    return _small(config, depth, None, experts=False, inner=False)


def _small(
    config: Mapping[str, Any], depth: int, kv_heads: int | None, experts: bool, inner: bool = True
) -> dict[str, Any]:
    """Return the config of a smaller model; kv_heads: how many are left of them, None for all."""
    settings = build_config(config)
    text = settings.get_text_config()
    result = language_config(config)
    for name in sorted(settings.sub_configs):
        part = getattr(settings, name, None)
        if part is not None:
            section = _Section(part, result.get(name) or {})
            section.shrink(depth if part is text else 1, kv_heads, experts, inner)
            result[name] = section.values
    if text is settings:
        section = _Section(settings, result)
        section.shrink(depth, kv_heads, experts, inner)
        result = section.values
    return result


class _Section:
    """One config and the mapping it is made from, which wins, so that derived settings are derived anew."""

    def __init__(self, made: Any, values: Mapping[str, Any]):
        self.made = made
        self.values = copy.deepcopy(dict(values))
        self.settings = {key: value for key, value in made.to_dict().items() if key != "model_type"}

    def name(self, key: str) -> str:
        """Return a key as this config.json spells it: GPT-2's `n_embd` is `hidden_size`."""
        return (self.made.attribute_map or {}).get(key, key)

    def get(self, *keys: str) -> Any:
        return next(
            (self.settings[self.name(key)] for key in keys if self.settings.get(self.name(key)) is not None), None
        )

    def set(self, key: str, value: Any) -> None:
        for other, name in (self.made.attribute_map or {}).items():
            if name == self.name(key):
                self.values.pop(other, None)
        self.values[self.name(key)] = self.settings[self.name(key)] = value

    def shrink(self, depth: int, kv_heads: int | None, experts: bool, inner: bool) -> None:
        self._depth(depth)
        vocabulary = _vocabulary(self.get("vocab_size") or _VOCABULARY)
        for key, value in list(self.settings.items()):
            if isinstance(value, int) and not isinstance(value, bool):
                if "vocab_size" in key and key != "type_vocab_size":
                    self.set(key, _vocabulary(value))
                elif _WINDOWS.search(key) and key != "max_window_layers" and value > 0:
                    self.set(key, min(value, WINDOW))
            if key.endswith(("token_id", "token_ids")):
                self.set(key, _each(value, lambda number: number % vocabulary if number >= 0 else number))
            if inner and _INNER.search(key):
                self.set(key, _each(value, lambda number: min(number, _INTERMEDIATE)))
        if experts:
            self._experts()
        if kv_heads is not None:
            self._width(kv_heads)

    def _depth(self, depth: int) -> None:
        full = self.get("num_hidden_layers") or getattr(self.made, "num_hidden_layers", None)  # a property (Nemotron-H)
        if not isinstance(full, int):
            return
        self.set("num_hidden_layers", min(depth, full))
        for key, value in list(self.settings.items()):
            if isinstance(value, (list, tuple)) and len(value) == full and key not in NOT_PER_LAYER:
                self.set(key, list(value)[:depth])
            if (
                isinstance(value, Mapping)
                and value
                and all(str(number).isdecimal() for number in value)
                and key not in NOT_PER_LAYER | {"id2label"}
            ):
                self.set(key, {number: setting for number, setting in value.items() if int(number) < depth})

    def _experts(self) -> None:
        taken = self.get(*_EXPERTS_TAKEN) or 2
        groups = self.get("n_group") or 1
        used = self.get("topk_group") or 1
        needed = max(groups * max(2, -(-taken // used)), taken + 2)
        needed += -needed % groups
        for key, value in list(self.settings.items()):
            if _EXPERTS.fullmatch(key) and isinstance(value, int):
                self.set(key, min(value, needed))

    def _width(self, most: int) -> None:
        """Take fewer heads of the same size; the hidden size shrinks by the same factor."""
        heads = self.get("num_attention_heads")
        hidden = self.get("hidden_size")
        if not isinstance(heads, int) or not isinstance(hidden, int):
            return
        kv_heads = self.get(*_KV_HEAD_KEYS) or heads
        if not isinstance(kv_heads, int) or heads % kv_heads:
            return
        small_kv = min(kv_heads, most)
        small = small_kv * min(heads // kv_heads, _GROUP)
        size, rest = divmod(hidden * small, heads)
        if rest and not self.get("head_dim"):
            return
        size = max(size - size % 8, 32) if self.get("head_dim") else size
        self.set("num_attention_heads", small)
        for key in _KV_HEAD_KEYS:
            if self.get(key):
                self.set(key, small_kv)
        self.set("hidden_size", min(size, hidden))
        self._state_heads(min(size, hidden))
        # a second name for the hidden size, such as the size of the embeddings
        for key, value in list(self.settings.items()):
            if (
                value == hidden
                and key != self.name("hidden_size")
                and re.search(r"dim$|size$|width$|d_model", key)
                and not _INNER.search(key)
            ):
                self.set(key, min(size, hidden))

    def _state_heads(self, hidden: int) -> None:
        """Take as many heads of Mamba-2 as go with a hidden size; where it does not decide them, two a group."""
        heads = self.get("mamba_num_heads")
        groups = self.get("n_groups")
        if isinstance(heads, int) and isinstance(groups, int):
            self.set("mamba_num_heads", min(heads, 2 * groups))
        expand = self.get("mamba_expand")
        dim = self.get("mamba_d_head")
        if (
            self.get("mamba_n_heads")
            and not self.get("mamba_d_ssm")
            and isinstance(expand, int)
            and isinstance(dim, int)
        ):
            self.set("mamba_n_heads", expand * hidden // dim)


def _vocabulary(size: int) -> int:
    return size if size <= _SMALL_VOCABULARY else _VOCABULARY


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return change(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_each(item, change) for item in value]
    return value
