"""What one step is asked for, checked: a list of `Advance` in, cache rows, starts and packed layout out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lockstep.errors import InputError
from lockstep.step.plan import Chunk, Layout


@dataclass(frozen=True)
class Advance:
    """One request's share of a step: `tokens` (int64, 1-D, at least one) at positions `start`, `start`+1, ... of its
    slot.

    `start` is 0 for a new request, which forgets what the slot held, else the number of tokens that the slot holds.
    """

    slot: int
    tokens: np.ndarray
    start: int

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
            raise InputError(
                f"step: slot {self.slot}: tokens: expected a list of integers, found "
                f"{tokens.dtype.name} {list(tokens.shape)}"
            )
        object.__setattr__(self, "tokens", tokens)


class Executor(Protocol):
    """What runs steps on a device. `lengths[slot]`: tokens that a slot holds, of at most `max_seq_len`; slots are 0 to
    `rows`-1.

    `Model` checks a step before it, has slots forgotten that new requests take, and sets `lengths` behind it.
    """

    rows: int
    max_seq_len: int

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def ahead(self) -> bool:
        """A step was begun that nobody has asked for yet."""
        ...

    def reset(self, slot: int) -> None: ...

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Take a step; the logits behind each request's last token, [len(advances), vocab_size] float32, in the order
        of the list."""
        ...

    def tokens(self, advances: Sequence[Advance], more: bool) -> np.ndarray:
        """Take a step; each request's most likely next token, [len(advances)] int64; -1 where that logit is NaN or
        infinite. more: `Model.step_tokens`."""
        ...


def check(advances: Sequence[Advance], cache: Executor, vocab_size: int, max_num_tokens: int | None) -> None:
    """Raises InputError, one line, for a step that cannot be taken. Changes nothing."""
    seen = set()
    total = 0
    for advance in advances:
        slot, start, count = advance.slot, advance.start, len(advance.tokens)
        if not 0 <= slot < cache.rows:
            raise InputError(f"step: slot: expected 0 to {cache.rows - 1}, found {slot}")
        if slot in seen:
            raise InputError(f"step: slot {slot}: expected once in a step, found twice")
        seen.add(slot)
        if start and start != cache.lengths[slot]:
            raise InputError(
                f"step: slot {slot}: start: expected 0 or {cache.lengths[slot]}, the tokens it holds, found {start}"
            )
        if not count:
            raise InputError(f"step: slot {slot}: expected at least one token, found none")
        if start + count > cache.max_seq_len:
            raise InputError(
                f"step: slot {slot}: expected at most {cache.max_seq_len} tokens (max_seq_len), found {start + count}"
            )
        low, high = (advance.tokens[0],) * 2 if count == 1 else (np.min(advance.tokens), np.max(advance.tokens))
        if low < 0 or high >= vocab_size:
            raise InputError(
                f"step: slot {slot}: tokens: expected 0 to {vocab_size - 1}, found {low if low < 0 else high}"
            )
        total += count
    if not total:
        raise InputError("step: expected at least one request, found none")
    if max_num_tokens is not None and total > max_num_tokens:
        raise InputError(
            f"step: expected at most {max_num_tokens} tokens (max_num_tokens), found {total}; "
            f"bring long prompts in chunks"
        )


def lay_out(advances: Sequence[Advance]) -> Layout:
    """Requests of one token decode, in the order of their rows; the others follow as chunks, in the order of the
    list."""
    rows = [advance.slot for advance in advances if len(advance.tokens) == 1]
    chunks = tuple(
        Chunk(advance.slot, advance.start, len(advance.tokens)) for advance in advances if len(advance.tokens) > 1
    )
    return Layout(min(rows, default=0), max(rows, default=-1) + 1, chunks, len(advances))
