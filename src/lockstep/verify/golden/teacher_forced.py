"""The logits of a whole sequence in transformers, their noise in fp16, and perplexity.

Needs torch and transformers. A model and token ids in; logits, or errors of logits, after some of the tokens out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from lockstep.errors import InputError
from lockstep.progress import steps
from lockstep.verify.rounded import NOISE_DTYPES, Choices, Rounded

# Tokens of a chunk: eager attention holds a score for each pair of tokens.
_CHUNK = 256


class Cached(NamedTuple):
    """The tokens that were run, and transformers' cache of them; None where it has none."""

    ids: tuple[int, ...]
    cache: Any


def run_after(model: torch.nn.Module, ids: Sequence[int], past: Cached | None = None) -> tuple[torch.Tensor, Cached]:
    """Run tokens after others; return their logits [num_tokens, vocab_size].

    transformers' cache takes its length from a layer with attention. A hybrid that is cut before its first one runs all
    its tokens once more.
    """
    before, cache = past or Cached((), None)
    all_ids = (*before, *ids)
    if not _has_attention(model.config):
        return model(input_ids=torch.tensor([all_ids]), use_cache=False).logits[0, len(before) :], Cached(all_ids, None)
    # With positions: some classes (Bamba) count new tokens from 0 whatever the cache holds.
    positions = torch.arange(len(before), len(all_ids))[None]
    output = model(input_ids=torch.tensor([list(ids)]), position_ids=positions, past_key_values=cache, use_cache=True)
    return output.logits[0], Cached(all_ids, output.past_key_values)


def _has_attention(config: Any) -> bool:
    layers = DynamicCache(config=config).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def logits_after(
    model: torch.nn.Module, ids: Sequence[int], counts: Collection[int]
) -> tuple[dict[int, np.ndarray], Cached | None]:
    """Return {number of tokens: logits [vocab_size] float32 after them}, and the cache of all."""
    logits: dict[int, np.ndarray] = {}
    cache = None
    with torch.no_grad():
        for start in steps(range(0, len(ids), _CHUNK), f"reference: {len(ids):,} tokens", "chunks"):
            rows, cache = run_after(model, ids[start : start + _CHUNK], cache)
            for count in range(start + 1, start + len(rows) + 1):
                if count in counts:
                    logits[count] = rows[count - 1 - start].float().numpy().copy()
    return logits, cache


def logit_noise(model: torch.nn.Module, ids: Sequence[int], expected: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the (largest, rms) error of each row of `expected` that transformers makes in fp16, [rows, 2] float32.

    Of a model with a router [rows, 4]: then the same errors with the experts that fp32 chose. expected: {number of
    tokens: logits in float32 after them}. Raises InputError for a model whose logits are not finite in 16 bits.
    """
    choices = _choices(model, ids)
    for dtype, rounding in NOISE_DTYPES:
        columns = []
        runs: list[AbstractContextManager[object]] = [contextlib.nullcontext()]
        if choices:
            runs.append(choices.replay())
        for run_choices in runs:
            with run_choices, Rounded(dtype):
                logits, _ = logits_after(model, ids, expected)
            errors = [logits[count].astype(np.float64) - row for count, row in expected.items()]
            columns.append([(np.abs(error).max(), np.sqrt(np.mean(error * error))) for error in errors])
        rows = np.concatenate([np.array(pairs) for pairs in columns], axis=1)
        if np.isfinite(rows).all():
            return (rows / rounding).astype(np.float32)
    raise InputError(
        f"{type(model).__name__}: expected finite logits of its weights rounded to bfloat16, found NaN "
        "or infinity; are these weights whole?"
    )


def _choices(model: torch.nn.Module, ids: Sequence[int]) -> Choices | None:
    """Return a model's choices along tokens; None for one without a router, which the first token shows."""
    for tokens in (ids[:1], ids):
        choices = Choices()
        with choices:
            logits_after(model, tokens, ())
        if not choices.takes_largest:
            return None
    return choices


def perplexity(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[float, int]:
    """Return the perplexity of a text within the model's positions, and the number of predicted tokens."""
    ids = tokens[: getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    if len(ids) < 2:
        raise InputError("golden.perplexity_text: expected a text of two tokens or more, found less; give a longer one")
    rows, _ = logits_after(model, ids[:-1], range(1, len(ids)))
    scores = torch.log_softmax(torch.from_numpy(np.stack([*rows.values()])).double(), -1)
    chosen = scores.gather(1, torch.tensor(ids[1:])[:, None])
    return math.exp(-float(chosen.mean())), len(chosen)


def logits_along(model: PreTrainedModel, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> np.ndarray:
    """Return a model's logits along answers, each a prompt and its tokens: [tokens, vocab_size]."""
    rows: list[np.ndarray] = []
    for prompt_ids, tokens in answers:
        ids = [*prompt_ids, *tokens[:-1]]
        logits, _ = logits_after(model, ids, range(len(prompt_ids), len(ids) + 1))
        rows += logits.values()
    return np.stack(rows)
