"""The parity check of long contexts and far positions: new tokens after a long synthetic KV cache.

In: a small model in split form and transformers' own model with the same weights. Out: logits of both. A fault may
begin at some length: a clamped position, cache rows that are lost from some number on, a wide window that is off by
one. Prefilling such lengths would take long; filling a cache with seeded numbers takes no time. Rows where something
may begin or end are scaled up, so that one row too many or too few shows.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from lockstep.artifacts.assembly import Assembly
from lockstep.export.reference_runner import PackedRequest, ReferenceRunner
from lockstep.export.torch_model import TokensBefore, eager_attention

_AFTER_PAST = "lockstep_after_past"
NEW = 4  # tokens that each request prefills; one more is then decoded
LONGEST = 4096  # cached tokens: 25 MB in a small model of a common shape
# cached tokens of the requests of a step: prefilling and decoding then go over 63 to 65, 255 to 257, ...
_LENGTHS = ((61, 254), (1000,), (LONGEST,))
_SHORT = 8  # cached tokens before far positions
_EDGE_SHARE = 4  # a scaled row weighs as much as a quarter of all others together


@dataclass(frozen=True)
class Context:
    """The requests of a step: their cached tokens and positions.

    lengths: of each, the number of its cached tokens. positions: of its first new token; the cached tokens count from
    0, so a larger position leaves a gap.
    """

    lengths: tuple[int, ...]
    positions: tuple[int, ...]


def contexts(assembly: Assembly, originals: Sequence[int]) -> list[Context]:
    """Return contexts around windows and the original lengths of RoPE settings, within the model's positions."""
    limit = (assembly.max_position_embeddings or LONGEST + NEW + 1) - NEW - 1
    windows = sorted({variant.window for variant in assembly.variants.values() if variant.window})
    requested = [*_LENGTHS, *((window - 2,) for window in windows if 2 < window <= LONGEST)]
    clipped: dict[tuple[int, ...], None] = {}
    for lengths in requested:
        distinct = dict.fromkeys(min(length, limit) for length in lengths)
        if min(distinct) > 0:
            clipped[tuple(distinct)] = None
    near = [Context(lengths, lengths) for lengths in clipped]
    # In a window a cache index is a position, so a gap would be another model: far positions then have no cache.
    num_cached = 0 if windows else _SHORT
    candidates = [limit]
    for original in originals:
        candidates += [original - 2, 2 * original]
    far = {position for position in candidates if LONGEST < position <= limit}
    if not far:
        return near
    return [*near, Context((num_cached,) * len(far), tuple(sorted(far)))]


@dataclass(frozen=True)
class Filled:
    """A context with (key, value) [1, num_kv_heads, length, dim] by request and layer; None of a state."""

    context: Context
    caches: list[list[tuple[np.ndarray, np.ndarray] | None]]
    tokens: list[np.ndarray]
    layer_numbers: list[int]


def fill(context: Context, assembly: Assembly, random: np.random.Generator) -> Filled:
    caches = []
    for length in context.lengths:
        layers: list[tuple[np.ndarray, np.ndarray] | None] = []
        for layer in assembly.layers:
            if layer.variant in assembly.state_mixers:
                layers.append(None)
                continue
            variant = assembly.variants[layer.variant]
            # Scores with a standard deviation of a half: attention that reads all rows, whatever the scale.
            spread = np.float32(0.5 * min(1.0, 1 / (variant.scale * variant.head_dim**0.5)))
            shape = (1, variant.num_kv_heads, length)
            key = random.standard_normal((*shape, variant.head_dim), np.float32)
            value = random.standard_normal((*shape, variant.value_head_dim), np.float32)
            # Rows at which something may begin or end weigh so much that one too many or too few shows in the logits.
            visible = min(length, variant.window or length)
            value[:, :, _edges(length, variant.window)] *= max(1.0, visible / _EDGE_SHARE)
            layers.append((key * spread, value))
        caches.append(layers)
    tokens = [random.integers(0, assembly.vocab_size, NEW + 1) for _ in context.lengths]
    return Filled(context, caches, tokens, assembly.layer_numbers)


def _edges(length: int, window: int) -> list[int]:
    """Return the cache rows at which something may begin or end: ends, powers of two, rows that leave the window."""
    rows = {0, 1, length - 2, length - 1}
    for exponent in range(5, 20):
        rows |= {2**exponent - 1, 2**exponent, 2**exponent + 1}
    if window:
        rows |= set(range(length - window - 2, length - window + NEW + 3))
    return sorted(row for row in rows if 0 <= row < length)


_past: contextvars.ContextVar[dict[int, tuple[torch.Tensor, torch.Tensor]]] = contextvars.ContextVar("past")


def _attend_after_past(
    module: Any,  # with a layer_idx, which torch.nn.Module does not declare
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over a layer's past rows and the new ones with the model's own function."""
    past = _past.get()
    past_key, past_value = past[module.layer_idx]
    key = torch.cat([past_key.to(key.dtype), key], dim=2)
    value = torch.cat([past_value.to(value.dtype), value], dim=2)
    past[module.layer_idx] = (key, value)
    return eager_attention(module)(module, query, key, value, attention_mask, **options)


AttentionInterface.register(_AFTER_PAST, _attend_after_past)
AttentionMaskInterface.register(_AFTER_PAST, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def reference_logits(model: PreTrainedModel, filled: Filled) -> list[np.ndarray]:
    """Return transformers' logits of all new tokens, [NEW + 1, vocab_size] for each request, which runs alone."""
    results = []
    implementation = model.config._attn_implementation
    model.config._attn_implementation = _AFTER_PAST
    try:
        with torch.no_grad():
            context = filled.context
            for layers, tokens, first, num_cached in zip(
                filled.caches, filled.tokens, context.positions, context.lengths, strict=True
            ):
                past = {}
                for number, pair in zip(filled.layer_numbers, layers, strict=True):
                    if pair is not None:
                        past[number] = (torch.from_numpy(pair[0]), torch.from_numpy(pair[1]))
                _past.set(past)
                rows = []
                cache = TokensBefore(model.config, num_cached)
                for start, stop in ((0, NEW), (NEW, NEW + 1)):
                    ids = torch.from_numpy(tokens[start:stop])[None]
                    positions = torch.arange(first + start, first + stop)[None]
                    cache.length = num_cached + start
                    output = model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
                    rows.append(output.logits[0].numpy())
                results.append(np.concatenate(rows))
    finally:
        model.config._attn_implementation = implementation
    return results


def split_logits(run: ReferenceRunner, filled: Filled) -> list[np.ndarray]:
    """Return the split form's logits, [NEW + 1, vocab_size] a request: each prefills, then all decode one together."""
    lengths = filled.context.lengths
    capacity = max(lengths) + NEW + 2
    caches = []
    for layer, pairs in enumerate(zip(*filled.caches)):
        stores = [np.zeros((len(lengths), *state), np.float32) for state in run.states_of(layer)]
        for rows in zip(*(pair for pair in pairs if pair is not None)):  # keys, then values, of each request
            _, heads, _, dim = rows[0].shape
            store = np.full((len(lengths), heads, capacity, dim), 300.0, np.float32)  # which a mask must hide
            for request, length in enumerate(lengths):
                store[request, :, :length] = rows[request][0]
            stores.append(store)
        caches.append(stores)
    # Far positions leave a gap after the cached tokens.
    runner = run.with_caches(caches, lengths, np.subtract(filled.context.positions, lengths))
    prefilled = runner.step([PackedRequest(request, tokens[:NEW]) for request, tokens in enumerate(filled.tokens)])
    decoded = runner.step([PackedRequest(request, tokens[NEW:]) for request, tokens in enumerate(filled.tokens)])
    return [np.concatenate(rows) for rows in zip(prefilled, decoded, strict=True)]
