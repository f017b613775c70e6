"""The logits of a whole sequence in transformers, and what fp16 costs of them.

Needs torch and transformers. A model and token ids in; logits, or errors of logits, behind some of the tokens out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from lockstep.errors import InputError
from lockstep.verify.rounded import NOISE_DTYPES, Rounded

# tokens that eager attention takes at a time: its scores are a number for each pair of tokens
_CHUNK = 256


class Cached(NamedTuple):
    """The tokens that were run, and transformers' cache of them: None where it keeps none."""

    ids: tuple[int, ...]
    cache: Any


def run_behind(model: torch.nn.Module, ids: Sequence[int], behind: Cached | None = None) -> tuple[torch.Tensor, Cached]:
    """Run tokens behind others; return their logits [num_tokens, vocab_size].

    transformers' cache takes its length from a layer with attention. A hybrid that is cut before its first one runs all
    its tokens again.
    """
    before, cache = behind or Cached((), None)
    whole = (*before, *ids)
    if not _has_attention(model.config):
        return model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, len(before) :], Cached(whole, None)
    # positions, because some classes (Bamba) count new tokens from 0 whatever the cache holds
    positions = torch.arange(len(before), len(whole))[None]
    output = model(input_ids=torch.tensor([list(ids)]), position_ids=positions, past_key_values=cache, use_cache=True)
    return output.logits[0], Cached(whole, output.past_key_values)


def _has_attention(config: Any) -> bool:
    layers = DynamicCache(config=config).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def logits_behind(
    model: torch.nn.Module, ids: Sequence[int], counts: Collection[int]
) -> tuple[dict[int, np.ndarray], Cached | None]:
    """Return {number of tokens: logits [vocab_size] float32 behind so many}, and the cache of all."""
    kept: dict[int, np.ndarray] = {}
    cache = None
    with torch.no_grad():
        for start in range(0, len(ids), _CHUNK):
            rows, cache = run_behind(model, ids[start : start + _CHUNK], cache)
            for count in range(start + 1, start + len(rows) + 1):
                if count in counts:
                    kept[count] = rows[count - 1 - start].float().numpy().copy()
    return kept, cache


def logit_noise(model: torch.nn.Module, ids: Sequence[int], expected: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the (largest, rms) error of each row of `expected` that transformers makes in fp16, [rows, 2] float32.

    expected: {number of tokens: logits in float32 behind so many of `ids`}. Raises InputError for a model whose logits
    are not finite in 16 bits.
    """
    for dtype, rounding in NOISE_DTYPES:
        with Rounded(dtype):
            found, _ = logits_behind(model, ids, expected)
        errors = [found[count].astype(np.float64) - row for count, row in expected.items()]
        rows = np.array([(np.abs(error).max(), np.sqrt(np.mean(error * error))) for error in errors])
        if np.isfinite(rows).all():
            return (rows / rounding).astype(np.float32)
    raise InputError(
        f"{type(model).__name__}: expected finite logits of its weights rounded to bfloat16, found NaN "
        "or infinity; are these weights whole?"
    )
