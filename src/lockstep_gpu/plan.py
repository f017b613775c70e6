"""What a step on GPUs computes: its rows that decode, its chunks of prompts, the passes that take them, their arrays.

What follows from requests, lengths and sizes alone goes in here: plain Python and NumPy, tested without a GPU. What has
a device array, a stream or a graph goes into `runner.py` (all ranks) or `ranks/rank.py` (one rank).

The words of the runtime:

- step: what the model asks for at once, new tokens of some slots (`StepPlan`)
- pass: one way through all blocks. A step takes one, or two: of the rows that decode, and of the chunks (`PackedPass`)
- part: some calls of a pass that are captured together
- call: one launch by the host, of an engine or a kernel, under the name that its time is reported under
- in flight: enqueued before the previous step's tokens are on the host, and not taken yet
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.step.advance import PREVIOUS_TOKEN, Advance, PackedTokens, next_power_of_two, split

SMALLEST_CHUNK = 16  # tokens that fused attention pads a chunk to, at least
LARGEST_BATCH = 4  # prompts in one call of fused attention
# Passes of up to this many tokens run their blocks as CUDA graphs, on one rank and on several, whose calls one host
# thread makes. In longer passes the GEMMs take longer than the host's launches. A frequent pass of up to CAPTURED_WHOLE
# tokens is captured as a single graph, which saves the gaps between graphs: a tenth of the shortest pass.
CAPTURED_TOKENS = 1280
CAPTURED_TOKENS_OF_RANKS = 2560
CAPTURED_WHOLE = 320
MAX_VERIFY_TOKENS = 128  # of a step that verifies drafts: more take longer than reading the weights does
# Tokens: a shorter pass is bound by reading the weights (7B shape, H200, fp16).
_WEIGHTS_BOUND = 192
Chunks = Sequence[tuple[int, int, int, int]]  # (row, position of the first token, first packed token, end)


@dataclass(frozen=True)
class StepLimits:
    """The sizes of an executor. captured_tokens: passes of up to this many tokens run their blocks as CUDA graphs."""

    num_slots: int
    max_seq_len: int
    max_num_tokens: int
    vocab_size: int
    captured_tokens: int

    @property
    def largest_pass(self) -> int:
        """Return the most tokens of a pass: rows of slots that don't decode count, too."""
        return self.max_num_tokens + self.num_slots


class BlockChoice(NamedTuple):
    """The blocks that a pass runs: those of a network, and so its weights, with or without adapters."""

    network: int = 0
    adapted: bool = False


class PackedPass(NamedTuple):
    """The host arrays of a pass with chunks: see `pass_inputs.Inputs` and `PassTokens`.

    Attributes:
        slots: [num_requests]: the slot whose next token follows, or -1.
        decoding: Of the length of a decode step: the slot's own number if it decodes, else -1.
        num_decoding: The packed tokens before the chunks; token i is slot i's.
        chunks: Their packed tokens are counted from `num_decoding`.
        has_previous: The rows that decode take the tokens of the previous step, on the device.
        logits: By slot, its row of the logits.
    """

    tokens: PackedTokens
    rows: np.ndarray
    logit_rows: np.ndarray
    slots: np.ndarray
    decoding: np.ndarray
    num_decoding: int
    chunks: Chunks
    has_previous: bool
    logits: dict[int, int]


@dataclass(frozen=True)
class StepPlan:
    """The new tokens of a step.

    Attributes:
        decoding: Advances of one token.
        chunks: Advances of several, the shortest first: attention batches prompts of similar length.
        lengths: By slot, the tokens that it holds after the step. A slot whose request changes is dropped from it.
        network: See `Advance`.
    """

    decoding: Sequence[Advance]
    chunks: Sequence[Advance]
    lengths: dict[int, int]
    network: int = 0

    @classmethod
    def of(cls, advances: Sequence[Advance]) -> StepPlan:
        decoding, chunks = split(advances)
        chunks = sorted(chunks, key=lambda chunk: len(chunk.tokens))
        lengths = {advance.slot: advance.start + len(advance.tokens) for advance in advances}
        return cls(decoding, chunks, lengths, advances[0].network if advances else 0)

    @property
    def num_chunk_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def lengths_after(self, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens that each slot holds after the step; lengths: before it."""
        after = lengths.copy()
        after[list(self.lengths)] = list(self.lengths.values())
        return after

    def can_follow(self, previous: StepPlan, lengths: np.ndarray, limits: StepLimits) -> bool:
        """Return whether the step is valid after another: `Model` has not checked it yet.

        lengths: the tokens of all slots between the two.
        """
        if len(self.lengths) < len(self.decoding) + len(self.chunks):  # two advances of a slot
            return False
        if max(self.lengths.values()) > limits.max_seq_len:
            return False
        if len(self.decoding) + self.num_chunk_tokens > limits.max_num_tokens:
            return False
        for advance in self.decoding:
            if self.network != previous.network:  # whose rows the step does not continue
                if advance.tokens[0] < 0 or advance.start != lengths[advance.slot]:
                    return False
            elif advance.tokens[0] != PREVIOUS_TOKEN[0] or advance.start != previous.lengths.get(advance.slot):
                return False
        for chunk in self.chunks:
            if not 0 <= chunk.slot < limits.num_slots or chunk.start != lengths[chunk.slot]:
                return False
            if not 0 <= chunk.tokens.min() <= chunk.tokens.max() < limits.vocab_size:
                return False
        return True

    def computes(self, step: StepPlan, previous_tokens: np.ndarray) -> bool:
        """Return whether this step, in flight, computes another's rows that decode, and its chunks if it has any.

        previous_tokens: by slot, the tokens that its rows take.
        """
        if not (step.decoding or self.chunks) or step.network != self.network:
            return False
        chunks = {chunk.slot: chunk for chunk in self.chunks}
        for advance in step.decoding:
            is_next = self.lengths.get(advance.slot) == advance.start + 1 and advance.slot not in chunks
            if not is_next or previous_tokens[advance.slot] != advance.tokens[0]:
                return False
        if not chunks:
            return True
        return all(chunk.slot in self.lengths and _is_same(chunk, chunks.get(chunk.slot)) for chunk in step.chunks)

    def passes(self, num_slots: int, tuned_for: Callable[[int], int]) -> list[StepPlan]:
        """Return the step as one pass, or as two if those are faster.

        A block costs as much as its profile's tuned size: 15 rows with 512 tokens of prompts may cost more than the
        two alone, and with 500 tokens nothing. tuned_for: returns the tokens that a pass costs as much as.
        """
        if not self.decoding or not self.chunks:
            return [self]

        def cost(num_tokens: int) -> int:
            return max(_WEIGHTS_BOUND, tuned_for(num_tokens))

        # One pass reads the weights once. Two passes let the rows run as a captured graph of `bucket` slots.
        rows = 1 + max(advance.slot for advance in self.decoding)
        tokens = self.num_chunk_tokens
        if cost(rows + tokens) <= cost(bucket(rows, num_slots)) + cost(tokens):
            return [self]
        return [StepPlan.of(self.decoding), StepPlan.of(self.chunks)]

    def pack(self, limits: StepLimits, write: bool = True) -> PackedPass:
        """Return the arrays of a pass with chunks; write: False for a warm-up, which changes no cache and no token.

        The packed tokens are one for each slot up to the highest that decodes, whether it decodes or not, then those of
        the chunks, then padding, which goes into no cache. If rows decode, the requests are all slots up to the highest
        of the step, rounded up by `bucket`; else they are the chunks.
        """
        decode_slots = [advance.slot for advance in self.decoding]
        step_slots = [*decode_slots, *(chunk.slot for chunk in self.chunks)]
        num_decoding = 1 + max(decode_slots, default=-1)
        requests: Sequence[int] = range(len(step_slots))
        num_requests = len(step_slots)
        num_rows = 0
        if decode_slots:
            requests = step_slots
            num_requests = bucket(1 + max(step_slots), limits.num_slots)
            num_rows = bucket(num_decoding, limits.num_slots)
        num_tokens = num_decoding + self.num_chunk_tokens
        # Only captured passes are padded: their graphs exist for a few sizes.
        padded = min(padded_size(num_tokens), limits.largest_pass)
        if padded > limits.captured_tokens:
            padded = num_tokens
        packed = PackedTokens.empty(padded)
        ranges = packed.pack(self.decoding, decode_slots, num_decoding, self.chunks)
        rows = np.full_like(packed.slots, -1)
        logit_rows = np.zeros(num_requests, np.int64)
        slots = np.full(num_requests, -1)
        decoding = np.full(num_rows, -1)
        logit_rows[requests] = [end - 1 for _, end in ranges]
        if write:
            rows = packed.slots
            slots[requests] = step_slots
            decoding[decode_slots] = decode_slots
        chunks = []
        for chunk, (start, end) in zip(self.chunks, ranges[len(decode_slots) :], strict=True):
            chunks.append((chunk.slot, chunk.start, start - num_decoding, end - num_decoding))
        # Negative: the token of the step before, which only the device knows yet.
        has_previous = bool(self.decoding) and bool(self.decoding[0].tokens[0] < 0)
        logits = dict(zip(step_slots, requests))
        return PackedPass(packed, rows, logit_rows, slots, decoding, num_decoding, chunks, has_previous, logits)


def warm_up_plans(limits: StepLimits) -> Iterator[tuple[StepPlan, bool]]:
    """Yield the passes with chunks that a warm-up runs, each with whether it is captured whole, too.

    They are a pass of each graph's size, of each power of two of tokens, with one and with several prompts, and with
    rows that decode.
    """
    longest = min(limits.max_num_tokens, limits.max_seq_len)
    for tokens in sorted({min(1 << power, longest) for power in range(1, longest.bit_length() + 1)}):
        for batch in range(1, 1 + min(LARGEST_BATCH, limits.num_slots)):
            last = min(tokens, limits.max_num_tokens - 2 * (batch - 1))
            if last < 2 or padded_chunk(last) != padded_chunk(tokens):
                continue
            chunks = [_dummy(slot, 2) for slot in range(batch - 1)]
            chunks.append(_dummy(batch - 1, last))
            yield StepPlan([], chunks, {}), False
            if batch == 1:  # with a row that decodes, attention of the prompt is a packed call
                yield StepPlan([_dummy(0, 1)], chunks, {}), False
    if longest < 2:
        return
    for rows in row_buckets(limits.num_slots):
        yield StepPlan([_dummy(rows - 1, 1)], [_dummy(0, 2)], {}), False
    max_tokens = min(limits.max_num_tokens, limits.num_slots * longest, limits.captured_tokens)
    for tokens in sorted({padded_size(count) for count in range(2, max_tokens + 1)}):
        all_tokens = np.zeros(min(tokens, max_tokens), np.int64)
        prompts = np.array_split(all_tokens, -(-len(all_tokens) // longest))
        yield StepPlan([], [Advance(slot, prompt, 0) for slot, prompt in enumerate(prompts)], {}), True


def bucket(count: int, rows: int) -> int:
    """Return the smallest power of two that is at least `count`, but at most `rows`."""
    return min(next_power_of_two(count), rows)


def row_buckets(num_slots: int) -> list[int]:
    """Return the numbers of rows of a decode step."""
    return sorted({bucket(rows, num_slots) for rows in range(1, num_slots + 1)})


def padded_size(count: int) -> int:
    """Round up to a power of two, from 32 on to a multiple of 32, and from 512 on to a multiple of 128."""
    if 0 < count < 32:
        return next_power_of_two(count)
    step = 32 if count < 512 else 128
    return -(-count // step) * step


def padded_chunk(tokens: int) -> int:
    """Return the number of tokens that fused attention pads a chunk to."""
    return max(SMALLEST_CHUNK, next_power_of_two(tokens))


def _dummy(slot: int, count: int) -> Advance:
    return Advance(slot, np.zeros(count, np.int64), 0)


def _is_same(chunk: Advance, other: Advance | None) -> bool:
    return other is not None and chunk.start == other.start and np.array_equal(chunk.tokens, other.tokens)
