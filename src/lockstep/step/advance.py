"""What one step is asked for, and its checks.

A list of `Advance` in; cache rows, starts and packed layout out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lockstep.errors import InputError
from lockstep.step.pages import PageTables
from lockstep.step.sampling import Sampling
from lockstep.weights.adapters import AdapterWriter, LoraArrays


@dataclass(frozen=True)
class Advance:
    """One request's share of a step.

    Attributes:
        tokens: [num_tokens] int64, at least one, at positions `start`, `start`+1, ... of the slot. In a step that
            follows another it may be `PREVIOUS_TOKEN`.
        start: The number of tokens that the slot holds; 0 for a new request, which clears the slot.
        verifies: The tokens after the first are drafts. Each token has the bits of a decode step, and the step returns
            the next token after each (`Model.verifies_drafts`).
        keeps_states: Keep the recurrent states at the ends of chunks until the next step, for `Executor.store`.
    """

    slot: int
    tokens: np.ndarray
    start: int
    verifies: bool = False
    keeps_states: bool = False

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
            raise InputError(
                f"step: slot {self.slot}: tokens: expected a list of integers, found "
                f"{tokens.dtype.name} {list(tokens.shape)}"
            )
        object.__setattr__(self, "tokens", tokens)

    @property
    def num_rows(self) -> int:
        """Return the rows of logits, or next tokens, that a step gives of it."""
        return len(self.tokens) if self.verifies else 1


# Stands for the token that the previous step chooses for the slot: the host may not have it yet.
PREVIOUS_TOKEN = np.array([-1], np.int64)


def then_decode(advances: Sequence[Advance]) -> list[Advance]:
    """Return the step behind `advances`, with one more token of each request."""
    return [Advance(each.slot, PREVIOUS_TOKEN, each.start + len(each.tokens)) for each in advances]


class Executor(Protocol):
    """Runs steps on a device.

    `lengths[slot]`: tokens that a slot holds, of at most `max_seq_len`; slots are 0 to `num_slots`-1. `tables` names
    the pages that the cache is made of.

    `Model` checks a step before it, resets slots that new requests take, and sets `lengths` behind it. `share` to
    `swap_in` are called only where `tables.shares` is not None.
    """

    num_slots: int
    max_seq_len: int
    tables: PageTables
    async_scheduling: bool  # a step that `tokens` is told of is begun before the tokens of the one before are known

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def in_flight(self) -> bool:
        """Return whether a step was begun whose tokens were not taken yet."""
        ...

    @property
    def max_verify_tokens(self) -> int:
        """Return the tokens of a step that `verifies`: more cost as much as steps of their own; 0: none does."""
        ...

    def warm_up(self) -> None:
        """Prepare all that steps are made of: see `Model.warm_up`."""
        ...

    def reset(self, slot: int) -> None:
        """Forget what a slot holds; its pages go back."""
        ...

    def room(self, length: int) -> int:
        """Return how many tokens can follow `length` tokens before a slot's memory is laid out anew."""
        ...

    def keep(self, slot: int, length: int) -> None:
        """Forget the tokens of a slot behind its first `length`, as if they had never come."""
        ...

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Take a step and return the logits behind each request's last token, or all that it verifies.

        [sum of `num_rows`, vocab_size] float32, in the order of the list. Raises InputError, and changes nothing, when
        the pool lacks pages for it.
        """
        ...

    def tokens(self, advances: Sequence[Advance], following: Sequence[Advance]) -> np.ndarray:
        """Take a step and return each request's next token, [sum of `num_rows`] int64.

        The tokens are chosen as `set_sampling` says; -1 where the largest logit is NaN or infinite. following:
        `Model.step_tokens`.
        """
        ...

    def tokens_and_logits(self, advances: Sequence[Advance], wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Take a step and return each request's next token, and some logits.

        The tokens are as of `tokens`; the logits [len(wanted), vocab_size] float32 are of these rows.
        """
        ...

    def set_sampling(self, slot: int, sampling: Sampling, choice: int) -> None:
        """Choose a slot's tokens by `sampling.draw` from now on.

        choice: number of the choice of its request. At temperature 0, as at first, the most likely token is chosen.
        What needs logits (`Sampling.needs_logits`) is ignored.
        """
        ...

    def take_adapters(
        self, arrays: Sequence[LoraArrays], max_lora_rank: int, adapter_slots: np.ndarray
    ) -> AdapterWriter | None:
        """Compute each slot from now on with an adapter.

        Slot `slot` gets the one in adapter slot `adapter_slots[slot]` of `arrays`, none for -1. adapter_slots: int64
        [num_slots], which changes between steps. Returns what writes adapters into the arrays; None: they are the
        host's.
        """
        ...

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Make an empty slot hold the tokens of `pages`, which are a prefix.

        Where `tables.shares`, its table begins with them; else they are copied.
        """
        ...

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Copy the slot's tokens from `start` on into `pages`.

        Not called where `tables.shares`.
        """
        ...

    def fork(self, slot: int, other: int) -> None:
        """Make another slot hold what a slot holds.

        Where `tables.shares`, the other's table begins with the slot's full pages already; what is behind them is
        copied.
        """
        ...

    def move(self, slot: int, other: int) -> None:
        """Make a slot that holds nothing hold what another one holds, which is reset.

        The table is the other's already. Called only where `tables.shares`.
        """
        ...

    def swap_out(self, slot: int) -> Any:
        """Copy what a slot holds to the host's memory, and reset the slot.

        Returns what `swap_in` takes.
        """
        ...

    def swap_in(self, slot: int, swapped: Any) -> None:
        """Make a slot, which has pages and holds nothing, hold what was swapped out."""
        ...


def check(advances: Sequence[Advance], cache: Executor, vocab_size: int, max_num_tokens: int | None) -> None:
    """Check that a step can be taken; changes nothing.

    Raises InputError, one line, where it cannot.
    """
    seen = set()
    total = 0
    for advance in advances:
        slot = advance.slot
        start = advance.start
        count = len(advance.tokens)
        if not 0 <= slot < cache.num_slots:
            raise InputError(f"step: slot: expected 0 to {cache.num_slots - 1}, found {slot}")
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
