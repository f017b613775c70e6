"""Small models of the same class and settings.

In: a config.json. Out: config.json mappings of smaller models.

Kept are the class, norms, biases, activations, caps, tied weights, rotary settings, head size and the sequence of layer
kinds. Depth, width, heads, experts, vocabulary and windows wider than the longest context of the parity check get
small. Keys are recognised by their names, which transformers' models share, so no model needs custom code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.export.language import NOT_PER_LAYER, build_config, language_config

WINDOW = 4096  # tokens: far_positions.py checks both sides of it
_VOCABULARY = 160
_SMALL_VOCABULARY = 512  # left as it is, so that a model that is small already need not be traced a second time
_INTERMEDIATE = 96
_KV_HEADS = (2, 4)  # more than one, so that heads taken in a wrong order show; some classes want a multiple of four
# query heads for each key head: another number than those above, so that the two are not mistaken for each other
_GROUP = 3
_KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts|moe_num_experts|num_local_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_INNER = re.compile(r"intermediate_(size|dim)|ffn_dim|ffn_hidden_size|n_inner|d_ff$|mlp_dim|share_expert_dim")
_WINDOWS = re.compile(r"window(_size)?$|sliding_window_size|attention_chunk_size|local_attention$")


def small_configs(config: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Yield configs of the first `depth` layers, the smallest first; a class may reject some."""
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
    """Return the config of a smaller model; kv_heads: the number to keep, None for all."""
    settings = build_config(config)
    text = settings.get_text_config()
    result = language_config(config)
    for name in sorted(settings.sub_configs):
        sub_config = getattr(settings, name, None)
        if sub_config is not None:
            section = _Section(sub_config, result.get(name) or {})
            section.shrink(depth if sub_config is text else 1, kv_heads, experts, inner)  # towers never run
            result[name] = section.values
    if text is settings:
        section = _Section(settings, result)
        section.shrink(depth, kv_heads, experts, inner)
        result = section.values
    return result


class _Section:
    """One config and its mapping, which is what changes, so that derived settings are derived again."""

    def __init__(self, config: Any, values: Mapping[str, Any]):
        self.config = config
        self.values = copy.deepcopy(dict(values))
        self.settings = {key: value for key, value in config.to_dict().items() if key != "model_type"}

    def name(self, key: str) -> str:
        """Return a key as this config.json spells it: GPT-2's `n_embd` is `hidden_size`."""
        return (self.config.attribute_map or {}).get(key, key)

    def get(self, *keys: str) -> Any:
        """Return the first setting of these keys that is not None."""
        for key in keys:
            value = self.settings.get(self.name(key))
            if value is not None:
                return value
        return None

    def set(self, key: str, value: Any) -> None:
        spelling = self.name(key)
        for alias, name in (self.config.attribute_map or {}).items():
            if name == spelling:
                self.values.pop(alias, None)
        self.values[spelling] = value
        self.settings[spelling] = value

    def shrink(self, depth: int, kv_heads: int | None, experts: bool, inner: bool) -> None:
        self._depth(depth)
        vocabulary = _vocabulary(self.get("vocab_size") or _VOCABULARY)
        for key, value in list(self.settings.items()):
            if isinstance(value, int) and not isinstance(value, bool):
                if "vocab_size" in key and key != "type_vocab_size":
                    self.set(key, _vocabulary(value))
                elif _WINDOWS.search(key) and key != "max_window_layers" and value > 0:
                    self.set(key, min(value, WINDOW))
            if key.endswith(("token_id", "token_ids")):  # a negative id, which means none, stays
                self.set(key, _map_numbers(value, lambda number: min(number, number % vocabulary)))
            if inner and _INNER.search(key):
                self.set(key, _map_numbers(value, lambda number: min(number, _INTERMEDIATE)))
        if experts:
            self._experts()
        if kv_heads is not None:
            self._width(kv_heads)

    def _depth(self, depth: int) -> None:
        full = self.get("num_hidden_layers")
        if not full:
            full = getattr(self.config, "num_hidden_layers", None)  # a property (Nemotron-H)
        if not isinstance(full, int):
            return
        self.set("num_hidden_layers", min(depth, full))
        for key, value in list(self.settings.items()):
            if key in NOT_PER_LAYER:
                continue
            if isinstance(value, (list, tuple)) and len(value) == full:
                self.set(key, list(value)[:depth])
            is_by_layer = isinstance(value, Mapping) and value and all(str(number).isdecimal() for number in value)
            if is_by_layer and key != "id2label":
                self.set(key, {number: setting for number, setting in value.items() if int(number) < depth})

    def _experts(self) -> None:
        """Keep as few experts as routing allows: two more than a token takes, and enough in each group."""
        per_token = self.get(*_EXPERTS_PER_TOKEN) or 2
        groups = self.get("n_group") or 1
        groups_per_token = self.get("topk_group") or 1
        per_group = max(2, -(-per_token // groups_per_token))
        needed = max(groups * per_group, per_token + 2)
        needed += -needed % groups
        for key, value in list(self.settings.items()):
            if _EXPERTS.fullmatch(key) and isinstance(value, int):
                self.set(key, min(value, needed))

    def _width(self, max_kv_heads: int) -> None:
        """Keep fewer heads of the same size; the hidden size shrinks by the same factor."""
        heads = self.get("num_attention_heads")
        hidden = self.get("hidden_size")
        if not isinstance(heads, int) or not isinstance(hidden, int):
            return
        kv_heads = self.get(*_KV_HEAD_KEYS) or heads
        if not isinstance(kv_heads, int) or heads % kv_heads:
            return
        small_kv = min(kv_heads, max_kv_heads)
        small = small_kv * min(heads // kv_heads, _GROUP)
        size, remainder = divmod(hidden * small, heads)
        if remainder and not self.get("head_dim"):
            return
        if self.get("head_dim"):
            size = max(size - size % 8, 32)
        self.set("num_attention_heads", small)
        for key in _KV_HEAD_KEYS:
            if self.get(key):
                self.set(key, small_kv)
        size = min(size, hidden)
        self.set("hidden_size", size)
        self._state_heads(size)
        # Other keys with the same number are the hidden size again, such as the size of the embeddings.
        for key, value in list(self.settings.items()):
            is_width = re.search(r"dim$|size$|width$|d_model", key) and not _INNER.search(key)
            if value == hidden and key != self.name("hidden_size") and is_width:
                self.set(key, size)

    def _state_heads(self, hidden: int) -> None:
        """Keep the heads of Mamba-2 that a hidden size implies; where it implies none, two in each group."""
        heads = self.get("mamba_num_heads")
        groups = self.get("n_groups")
        if isinstance(heads, int) and isinstance(groups, int):
            self.set("mamba_num_heads", min(heads, 2 * groups))
        if not self.get("mamba_n_heads") or self.get("mamba_d_ssm"):
            return
        expand = self.get("mamba_expand")
        dim = self.get("mamba_d_head")
        if isinstance(expand, int) and isinstance(dim, int):
            self.set("mamba_n_heads", expand * hidden // dim)


def _vocabulary(size: int) -> int:
    return size if size <= _SMALL_VOCABULARY else _VOCABULARY


def _map_numbers(value: Any, change: Callable[[int], int]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return change(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_map_numbers(item, change) for item in value]
    return value
