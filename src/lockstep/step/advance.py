"""The request for a step, its checks, its packed tokens, and the interfaces of executors and observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lockstep.errors import InputError
from lockstep.step.logits_pipeline import Masks, Sampler
from lockstep.step.pages import PageTables
from lockstep.step.sampling import Logprobs
from lockstep.weights.adapters import AdapterWriter, LoraArrays

if TYPE_CHECKING:
    from lockstep.step.network import Network


@dataclass(frozen=True)
class Advance:
    """One request's share of a step.

    Attributes:
        tokens: [num_tokens] integers, at least one, at positions `start`, `start`+1, ... of the slot. In a step that
            follows another it may be `PREVIOUS_TOKEN`.
        start: The number of tokens that the slot holds; 0 for a new request, which clears the slot.
        verifies: The tokens after the first are drafts. Each token has the bits of a decode step, and the step returns
            the next token after each (`Model.verifies_drafts`).
        keeps_states: Keep the recurrent states at the ends of chunks until the next step, for `Executor.store`.
        masks: The tokens that may be chosen from this step on; None: as in the steps before. For executors that process
            logits.
        network: The number of the executor's network, and so the weights, that compute it: one for all of a step.
    """

    slot: int
    tokens: np.ndarray
    start: int
    verifies: bool = False
    keeps_states: bool = False
    masks: Masks | None = None
    network: int = 0

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
        """Return the number of next tokens, or rows of logits, that a step returns for it."""
        return len(self.tokens) if self.verifies else 1


# A placeholder for the token that the previous step chooses for the slot: the host may not have it yet.
PREVIOUS_TOKEN = np.array([-1], np.int64)


def then_decode(advances: Sequence[Advance]) -> list[Advance]:
    """Return the step after `advances`, in which each request decodes one token."""
    return [
        Advance(advance.slot, PREVIOUS_TOKEN, advance.start + len(advance.tokens), network=advance.network)
        for advance in advances
    ]


class Load(Protocol):
    """Weights on their way to a network of an executor: see `Executor.load`."""

    def done(self) -> bool:
        """Return whether `finish` returns without waiting."""

    def finish(self) -> None:
        """Wait until steps can use the network, in the thread that runs steps. Raises what went wrong."""


class Observer(Protocol):
    """Sees the values between the blocks of a running step; it must copy arrays that it keeps.

    The golden check looks on so at models that choose inside.
    """

    def step(self, tokens: PackedTokens) -> None: ...

    def block(self, part: str, layer: int, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """See a block's inputs and outputs.

        part: "block", before the attention of `layer`, or "exit", whose outputs have the rows `logit_rows`.
        """


class Executor(Protocol):
    """Runs steps on a device, with a KV cache for slots 0 to `num_slots`-1.

    `lengths[slot]`: tokens that a slot holds, of at most `max_seq_len`. `tables`: the pages of each slot. It has one or
    several networks of the same engines, each with weights; `Advance.network` chooses.

    `Model` checks a step before, resets the slots of new requests, and sets `lengths` after a step. `share` to
    `swap_in` are called only if `tables.shares` is not None.
    """

    num_slots: int
    max_seq_len: int
    tables: PageTables
    async_scheduling: bool  # the step that `tokens` gets as `following` is launched speculatively
    processes_logits: bool  # `set_sampling` takes all parameters; else it takes those of draws

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def logprobs(self) -> Mapping[int, Logprobs]:
        """Return by slot the log-probabilities of the last step's tokens, where `set_sampling` asks for them."""

    @property
    def in_flight(self) -> bool:
        """Return whether a step was launched speculatively and not taken yet."""

    @property
    def max_verify_tokens(self) -> int:
        """Return the tokens of a step that verifies, up to which it is faster than several steps; 0: unsupported."""

    def warm_up(self) -> Iterator[None]:
        """Run all calls once, in parts: see `Model.warm_up_parts`."""

    def reset(self, slot: int) -> None:
        """Clear a slot and release its pages."""

    def room(self, length: int) -> int:
        """Return how many tokens fit after `length` tokens before a slot's memory must grow."""

    def keep(self, slot: int, length: int) -> None:
        """Truncate a slot to `length` tokens."""

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Run a step; return the logits after each request's last token, or after each token that it verifies.

        [sum of `num_rows`, vocab_size] float32, in the order of `advances`. Raises InputError, and changes nothing, if
        the pool has too few free pages.
        """

    def tokens(self, advances: Sequence[Advance], following: Sequence[Advance]) -> np.ndarray:
        """Run a step; return the next tokens, [sum of `num_rows`] int64, chosen as set by `set_sampling`.

        A token is -1 if the largest logit is NaN or infinite. following: see `Model.step_tokens`.
        """

    def tokens_and_logits(
        self, advances: Sequence[Advance], logit_rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run a step; return what `tokens` does, and the logits of some rows, [len(logit_rows), vocab_size] float32."""

    def set_sampling(self, slot: int, sampler: Sampler) -> None:
        """Set how a slot's tokens are chosen from now on; an executor that processes logits counts them itself."""

    def load(self, network: int, weights_json: Path, bind: Callable[[Path], Network]) -> Load:
        """Start to replace the weights of a network, which no request uses, while steps of others run.

        bind: returns a network of such weights, for executors whose networks are replaced as a whole. Call it again for
        this network after `Load.finish`.
        """

    def preload(self, checkpoints: Sequence[Path]) -> Iterator[None]:
        """Read weights into host memory, in parts, as far as it has room, so that loads take less time."""

    def take_adapters(
        self, networks: Sequence[Sequence[LoraArrays]], max_lora_rank: int, adapter_slots: np.ndarray
    ) -> AdapterWriter | None:
        """Use adapters from now on: those in slots of arrays, by request slot.

        networks: the arrays of each network; host arrays are the same ones.
        adapter_slots: int64 [num_slots], the adapter slot of each slot's request or -1, which the caller changes
        between steps. Returns a writer of adapters into the arrays; None if they are host arrays.
        """

    def observe(self, observer: Observer | None) -> None:
        """Show later steps to an observer, block by block, with the same bits but more slowly; None ends it."""

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Put the prefix in `pages` into an empty slot: its table starts with them if `tables.shares`, else copy."""

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Copy the slot's tokens from `start` on into `pages`. Not called if `tables.shares`."""

    def fork(self, slot: int, other: int) -> None:
        """Copy a slot to another; if `tables.shares`, only what its full pages, which both tables have, lack."""

    def move(self, slot: int, other: int) -> None:
        """Move a slot's contents to an empty slot, whose table has the pages already. Only if `tables.shares`."""

    def swap_out(self, slot: int) -> Any:
        """Copy a slot to host memory and reset it; return the copy, for `swap_in`."""

    def swap_in(self, slot: int, swapped: Any) -> None:
        """Copy the result of `swap_out` into a slot that has pages."""


def check(advances: Sequence[Advance], cache: Executor, vocab_size: int, max_num_tokens: int | None) -> None:
    """Raise InputError for a step that `Model.step` does not take."""
    slots = set()
    total = 0
    for advance in advances:
        slot = advance.slot
        start = advance.start
        count = len(advance.tokens)
        if not 0 <= slot < cache.num_slots:
            raise InputError(f"step: slot: expected 0 to {cache.num_slots - 1}, found {slot}")
        if slot in slots:
            raise InputError(f"step: slot {slot}: expected once in a step, found twice")
        if advance.network != advances[0].network:
            raise InputError(
                f"step: slot {slot}: expected network {advances[0].network}, which the step began with, found "
                f"{advance.network}; take a step for each"
            )
        slots.add(slot)
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
        extremes = [advance.tokens[0]]
        if count > 1:  # a token of a decode step is not worth a reduction
            extremes = [np.min(advance.tokens), np.max(advance.tokens)]
        for token in extremes:
            if not 0 <= token < vocab_size:
                raise InputError(f"step: slot {slot}: tokens: expected 0 to {vocab_size - 1}, found {token}")
        total += count
    if not total:
        raise InputError("step: expected at least one request, found none")
    if max_num_tokens is not None and total > max_num_tokens:
        raise InputError(
            f"step: expected at most {max_num_tokens} tokens (max_num_tokens), found {total}; split long prompts"
        )


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The packed tokens of a step, int64 [num_tokens] each.

    slots: -1 for a row that doesn't decode, which has token 0 at position 0.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    slots: np.ndarray

    @classmethod
    def empty(cls, num_tokens: int) -> PackedTokens:
        return cls(np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64), np.full(num_tokens, -1))

    def pack(
        self, decoding: Sequence[Advance], rows: Sequence[int], num_rows: int, chunks: Sequence[Advance]
    ) -> list[tuple[int, int]]:
        """Pack a step: `num_rows` rows that decode, then chunks.

        rows: the rows of `decoding`; others don't decode. Returns the (start, end) of each request's packed tokens,
        first of `decoding`, then of the chunks.
        """
        token_ids = self.token_ids
        position_ids = self.position_ids
        slots = self.slots
        if num_rows > len(rows):
            token_ids[:num_rows] = position_ids[:num_rows] = 0
            slots[:num_rows] = -1
        for row, advance in zip(rows, decoding):
            token_ids[row] = advance.tokens[0]
            position_ids[row] = advance.start
            slots[row] = advance.slot
        ranges = [(row, row + 1) for row in rows]
        start = num_rows
        for chunk in chunks:
            count = len(chunk.tokens)
            end = start + count
            token_ids[start:end] = chunk.tokens
            slots[start:end] = chunk.slot
            position_ids[start:end] = np.arange(chunk.start, chunk.start + count)
            ranges.append((start, end))
            start = end
        return ranges

    def adapter_ids(self, adapter_slots: np.ndarray) -> np.ndarray:
        """Return the adapter slot of each token, or -1; adapter_slots: by request slot."""
        return np.where(self.slots >= 0, adapter_slots[self.slots], -1)


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`, a positive number."""
    return 1 << (count - 1).bit_length()


def split(advances: Sequence[Advance]) -> tuple[list[Advance], list[Advance]]:
    """Split a step into advances of one token, which decode, and chunks of several."""
    decoding = [advance for advance in advances if len(advance.tokens) == 1]
    if len(decoding) == len(advances):
        return decoding, []
    return decoding, [advance for advance in advances if len(advance.tokens) > 1]
