"""Decode prompts through the runtime's `step`, in one batch or alone: prompts and a choice of next tokens in, logits
and times out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.runtime import Advance, Model

# (number of the prompt, number of the step, logits [vocab_size] float32) -> the next token, and whether to go on behind
# it.
Choose = Callable[[int, int, np.ndarray], tuple[int, bool]]


@dataclass
class Decoded:
    """Of each prompt, in their order: the logits [vocab_size] of every step and the token chosen from them. Times over
    all prompts."""

    logits: list[list[np.ndarray]]
    tokens: list[list[int]]
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


def decode(model: Model, prompts: Sequence[Sequence[int]], choose: Choose, max_num_tokens: int) -> Decoded:
    """Run all prompts, as many together as the model has slots.

    A prompt's tokens come in one step where they fit with those of the others in `max_num_tokens`, else in chunks.
    `choose` is asked after each step of a prompt that has taken in all of it.
    """
    result = Decoded([[] for _ in prompts], [[] for _ in prompts])
    for first in range(0, len(prompts), model.max_batch_size):
        group = range(first, min(first + model.max_batch_size, len(prompts)))
        rows = _prefill(model, {i - first: prompts[i] for i in group}, max_num_tokens, result)
        lengths = {i: len(prompts[i]) for i in group}
        active = _choose(result, choose, {i: rows[i - first] for i in group})
        while active:
            advances = [Advance(i - first, np.array([token], np.int64), lengths[i]) for i, token in active.items()]
            start = time.perf_counter()
            logits = model.step(advances)
            result.decode_seconds += time.perf_counter() - start
            result.decode_tokens += len(advances)
            for i in active:
                lengths[i] += 1
            active = _choose(result, choose, dict(zip(active, logits)))
    return result


def _choose(result: Decoded, choose: Choose, rows: dict[int, np.ndarray]) -> dict[int, int]:
    """Record each prompt's logits and next token; gives {prompt: token} of those that go on."""
    active = {}
    for i, row in rows.items():
        result.logits[i].append(row)
        token, more = choose(i, len(result.logits[i]) - 1, row)
        result.tokens[i].append(token)
        if more:
            active[i] = token
    return active


def _prefill(
    model: Model, prompts: dict[int, Sequence[int]], max_num_tokens: int, result: Decoded
) -> dict[int, np.ndarray]:
    """Bring {slot: prompt} into the cache, at most `max_num_tokens` a step; gives the logits behind each prompt's last
    token."""
    done = dict.fromkeys(prompts, 0)
    logits: dict[int, np.ndarray] = {}
    while len(logits) < len(prompts):
        advances, room = [], max_num_tokens
        for slot, prompt in prompts.items():
            count = min(len(prompt) - done[slot], room)
            if count:
                advances.append(Advance(slot, np.array(prompt[done[slot] : done[slot] + count], np.int64), done[slot]))
                room -= count
        start = time.perf_counter()
        rows = model.step(advances)
        result.prefill_seconds += time.perf_counter() - start
        for advance, row in zip(advances, rows):
            done[advance.slot] += len(advance.tokens)
            if done[advance.slot] == len(prompts[advance.slot]):
                logits[advance.slot] = row
        result.prefill_tokens += sum(len(advance.tokens) for advance in advances)
    return logits
