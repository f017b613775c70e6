"""The logits of a whole sequence in transformers, and what fp16 costs of them.

Needs torch and transformers. A model and token ids in; logits, or errors of logits, behind some of the tokens out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.errors import InputError
from lockstep.verify.rounded import NOISE_DTYPES, Rounded

# tokens that eager attention takes at a time: its scores are a number for each pair of tokens
_CHUNK = 256


def logits_behind(
    model: torch.nn.Module, ids: Sequence[int], counts: Collection[int]
) -> tuple[dict[int, np.ndarray], Any]:
    """Return {number of tokens: logits [vocab_size] float32 behind so many}, and the KV cache of all."""
    kept, cache = {}, None
    with torch.no_grad():
        for start in range(0, len(ids), _CHUNK):
            chunk = torch.tensor([list(ids[start : start + _CHUNK])])
            positions = torch.arange(start, start + chunk.shape[1])[None]
            output = model(input_ids=chunk, position_ids=positions, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            for count in range(start + 1, start + chunk.shape[1] + 1):
                if count in counts:
                    kept[count] = output.logits[0, count - 1 - start].float().numpy().copy()
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
