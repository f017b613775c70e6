"""The records of a slot that the kernel which chooses tokens reads and writes."""

from __future__ import annotations

import numpy as np

from lockstep.step.logits_pipeline import Masks, Sampler
from lockstep.step.sampling import MAX_LOGPROBS, SMALLEST, Logprobs, scaled_temperature

# A slot's parameters: `Sampling` in next_token.cu. temperature: 0 is greedy; top_k: 0 is all.
PARAMETERS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("min_p", "f4"),
        ("repetition_penalty", "f4"),
        ("top_p", "f8"),
        ("presence_penalty", "f8"),
        ("frequency_penalty", "f8"),
        ("seed", "u8"),
        ("choice", "u8"),
        ("num_prompt_tokens", "i8"),
        ("changes", "i4"),
        ("num_logprobs", "i4"),
    ]
)
MASKED = 1
BIASED = 2
PENALIZED = 4
# A slot's log-probabilities: `Logprobs` in next_token.cu. One is a logit minus `total`.
LOGPROBS = np.dtype(
    [
        ("total", "f8"),
        ("chosen", "f4"),
        ("unused", "i4"),
        ("tokens", "i4", MAX_LOGPROBS),
        ("logits", "f4", MAX_LOGPROBS),
    ]
)


def parameters(sampler: Sampler) -> np.ndarray:
    """Return a choice's PARAMETERS, without masks."""
    sampling = sampler.sampling
    changes = BIASED * bool(sampling.logit_bias) + PENALIZED * sampling.has_penalties
    if not (sampling.temperature or changes or sampling.logprobs is not None):
        return np.zeros((), PARAMETERS)
    fields = (
        float(scaled_temperature(sampling)) if sampling.temperature else 0.0,
        min(sampling.top_k, np.iinfo(np.int32).max),
        sampling.min_p,
        max(sampling.repetition_penalty, SMALLEST),
        sampling.top_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
        sampler.choice,
        sampler.num_prompt_tokens,
        changes,
        0 if sampling.logprobs is None else sampling.logprobs + 1,
    )
    return np.array(fields, PARAMETERS)


def count_tokens(sampler: Sampler, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a choice's `LogitsTables.counts`, [vocab_size] int32, and its `counted`, [2] int32."""
    counts = np.zeros(vocab_size, np.int32)
    counts[list(sampler.counts)] = list(sampler.counts.values())
    counts[sampler.prompt_ids] |= np.int32(-(1 << 31))
    last_token = sampler.answer[-1] if sampler.answer else -1
    return counts, np.array([sampler.num_prompt_tokens + len(sampler.answer) - 1, last_token], np.int32)


def bits_of(masks: Masks) -> np.ndarray:
    """Return the bits of `LogitsTables.masks`, [2, words] uint32, the lowest bit first."""
    vocab_size = len(masks.allowed)
    bits = np.zeros((2, -(-vocab_size // 32) * 32), bool)
    bits[:, :vocab_size] = masks
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


def read_logprobs(record: np.ndarray, count: int) -> Logprobs:
    """Return the log-probabilities in a record of LOGPROBS. count: of the likeliest tokens."""
    total = float(record["total"])
    top = zip(record["tokens"][:count].tolist(), record["logits"][:count].tolist())
    return Logprobs(float(record["chosen"]) - total, tuple((token, logit - total) for token, logit in top))
