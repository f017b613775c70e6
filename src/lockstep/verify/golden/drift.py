"""How far a model with rounded numbers is from the checkpoint's. Needs torch.

Models in transformers, float32, in; perplexities, logits and a `Drift` out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.artifacts.drift import Drift
from lockstep.errors import InputError
from lockstep.onnx_tools.metrics import max_abs_error


def perplexity(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[float, int]:
    """Return the perplexity of a text within the model's positions, and on how many tokens."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    ids = torch.tensor([list(tokens[:limit])])
    if ids.shape[1] < 2:
        raise InputError("golden.drift_text: expected a text of two tokens or more, found less; give a longer one")
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].double(), -1)
    chosen = scores.gather(1, ids[0, 1:, None])
    return math.exp(-float(chosen.mean())), len(chosen)


def logits_along(model: PreTrainedModel, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> np.ndarray:
    """Return a model's logits along answers, each a prompt and its tokens: [tokens, vocab_size]."""
    found = []
    for prompt_ids, tokens in answers:
        ids = torch.tensor([[*prompt_ids, *tokens[:-1]]])
        with torch.no_grad():
            found.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 :].float().numpy())
    return np.concatenate(found)


def drift_of(
    expected: np.ndarray,
    found: np.ndarray,
    perplexities: tuple[float, float],
    count: int,
    layers: int | str,
    precision: str,
    group_size: int = 0,
    max_weight_error: float = 0.0,
    kv_cache_dtype: str | None = None,
) -> Drift:
    """Return the drift of logits; perplexities: of the rounded numbers and the checkpoint's, on `count` tokens."""
    own, full = perplexities
    return Drift(
        layers=layers,
        precision=precision,
        group_size=group_size,
        kv_cache_dtype=kv_cache_dtype,
        max_weight_error=max_weight_error,
        max_logit_error=max_abs_error(expected, found),
        rms_logit_error=_rms(found - expected),
        rms_logit=_rms(expected),
        tokens=len(expected),
        tokens_differing=int((found.argmax(-1) != expected.argmax(-1)).sum()),
        perplexity_tokens=count,
        perplexity=own,
        full_perplexity=full,
    )


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))
