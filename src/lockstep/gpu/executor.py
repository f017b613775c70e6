"""The executor on GPUs: a CPU step's engines in the same order, values on devices.

Rows that decode are one CUDA graph for each (number of rows, capacity of the cache): embedding, blocks, attention,
cache, logits, next tokens. It runs rows 0 to a power of two, whatever slots decode; a row that does not decode is
written nowhere. Tokens of prompts are a pass that is put on the stream call by call, as the calls are made: the device
is at the first layers while the host prepares the next ones. A pass is padded to one of few sizes (`PromptInputs`), so
that most of its calls are CUDA graphs (`Part`). Rows that decode beside prompts go through the blocks in the same pass,
which reads the weights once, where that is no slower; each has the attention that it has alone.

The device chooses the tokens, greedy or drawn: where these alone are asked for, no logits come back, and the device
holds what the next step goes on with. A caller that knows the next step says so, prompts and all, and it is launched
speculatively: put on the stream before this one's tokens are back, so that the device does not wait for the host. Rows
of it that are not asked for after all are dropped, and prompts that come on top follow it in a pass of their own.

A step that verifies drafts is a decode step, of rows that are tokens of any slots: each has its slot's page table, and
keys and values of all are written before any is read.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.gpu import cuda
from lockstep.gpu.attention.base import LARGEST_BATCH, padded
from lockstep.gpu.prompts import bucket, captured_sizes, padded_size
from lockstep.gpu.ranks.group import RankGroup
from lockstep.gpu.ranks.rank import MOST_VERIFIED, Rank, StepCalls
from lockstep.gpu.resident_adapters import ResidentAdapters
from lockstep.step.advance import FOUND, Advance
from lockstep.step.network import LayerAttention, Network
from lockstep.step.packing import split
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Sampling
from lockstep.weights.adapters import AdapterWriter, LoraArrays

# Passes of prompts that are captured whole, by their layout, at most; and how often one comes before it is: to capture
# it takes the host as long as it saves in so many.
_MOST_CAPTURED = 128
_CAPTURED_AFTER = 16
_WEIGHTS_BOUND = 192  # tokens: a pass of fewer takes as long as the weights take to be read (7B shape, H200, fp16)


@dataclass
class _Flight:
    """A step in flight; ends: by slot, its tokens after the step. chunks: by slot its prompts."""

    ends: dict[int, int]
    chunks: dict[int, Advance]
    passes: list[list[StepCalls]]  # by pass, by rank
    rows: list[dict[int, cuda.Array]]  # by rank, by slot: its logits [1, vocab_size], there until the next step
    fetched: list[tuple[np.ndarray, cuda.Event]]  # by rank, page-locked: what it finds, by slot, behind the event
    given: np.ndarray | None = None  # of a step that was not asked for yet: the tokens that it went on with, by slot
    loads: np.ndarray | None = None  # likewise: by slot, which load of an adapter (GpuExecutor._loads)

    @property
    def tokens(self) -> np.ndarray:
        """Return the first rank's tokens, by slot."""
        return self.fetched[0][0]


class GpuExecutor:
    """An executor of the steps of a Network whose engines are GPU programs.

    `lengths[slot]`: tokens that a slot holds. Several ranks run the same step, each on its device; the first one's
    tokens and logits come back.
    """

    def __init__(
        self, network: Network, num_slots: int, max_seq_len: int, max_num_tokens: int, kv_bytes: float | None = None
    ):
        """Allocate the KV cache, of kv_bytes a device: None: the longest requests, or 0.9 of what is free."""
        cuda.leave_at_exit(self)
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.lengths = np.zeros(num_slots, np.int64)
        # slots that a step was begun for since they were forgotten: it may have failed, and their length be 0 still
        self._written: set[int] = set()
        self.group = RankGroup(network, num_slots, max_seq_len, max_num_tokens, kv_bytes)
        self.ranks = self.group.ranks
        self.tables = self.group.tables
        self._max_num_tokens = max_num_tokens
        self._in_flight: _Flight | None = None  # a step that nobody has asked for yet
        # the step with one prompt that was taken last, and its slots
        self._prompt: tuple[list[StepCalls], list[int]] | None = None
        # passes of prompts, by layout, adapted and drawn: how often they came, and those that are captured whole
        self._came = Counter[tuple]()
        self._captured = dict[tuple, list[StepCalls]]()
        self._host_logits: np.ndarray | None = None
        self._resident: ResidentAdapters | None = None  # whose memory copies on the stream read
        # A step that is launched early and dropped leaves keys, which the next one writes over, but moves states.
        self.async_scheduling = all(isinstance(mixer, LayerAttention) for _, mixer in network.layers)

    def __del__(self) -> None:
        if hasattr(self, "group"):
            self.group.drain()  # what is freed now may be at work still

    @property
    def in_flight(self) -> bool:
        """Return whether a step was launched that has not been asked for yet."""
        return self._in_flight is not None

    @property
    def most_verified(self) -> int:
        """Return the tokens of a step that verifies: see `Executor.most_verified`."""
        fused = len(self.ranks) == 1 and self.tables.shares
        return min(MOST_VERIFIED, self._max_num_tokens) if fused else 0

    def room(self, length: int) -> int:
        """Return how many tokens can follow without a page that a plain step would not take, but for one of many."""
        spare = PAGE_SIZE if self.tables.pool.num_available > 2 * self.num_slots else 0
        return min(self.tables.pages_for(length) * PAGE_SIZE + spare, self.max_seq_len) - length

    def keep(self, slot: int, length: int) -> None:
        """Forget a slot's tokens behind its first `length`; what they left in its pages is not looked at."""
        self.lengths[slot] = length

    def reset(self, slot: int) -> None:
        """Forget what a slot holds and release its pages."""
        if slot in self._written:
            for rank in self.group.each():
                for attention in rank.attentions:
                    attention.reset(slot)
        self._written.discard(slot)
        self._leave_flight(slot)
        self.tables.release(slot)
        self.lengths[slot] = 0

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Let the slot's page table begin with `pages`; nothing is copied."""
        self._written.add(slot)

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        raise AssertionError("a prefix is not copied: its pages are in the slot's table")

    def fork(self, slot: int, other: int) -> None:
        """Copy what is behind the slot's full pages."""
        self._written.add(other)
        for rank in self.group.each():
            for attention in rank.paged:
                attention.fork(slot, other, int(self.lengths[slot]))

    def move(self, slot: int, other: int) -> None:
        """Have a slot's pages read for another slot; nothing is copied."""
        self._in_flight = self._prompt = None
        for rank in self.group.each():
            for attention in rank.paged:
                attention.reset(slot)
                attention.reset(other)
        self._written.discard(slot)
        self._written.add(other)
        self.lengths[other] = self.lengths[slot]
        self.lengths[slot] = 0

    def swap_out(self, slot: int) -> list[list[np.ndarray]]:
        """Copy the slot's pages to page-locked memory, by rank, and reset it."""
        length = int(self.lengths[slot])
        swapped = [[attention.save(slot, length) for attention in rank.paged] for rank in self.group.each()]
        self.group.synchronize()
        self.reset(slot)
        return swapped

    def swap_in(self, slot: int, swapped: Sequence[Sequence[np.ndarray]]) -> None:
        """Copy pages back into those that the slot has now."""
        self._written.add(slot)
        for rank, saved in zip(self.group.each(), swapped, strict=True):
            for attention, pages in zip(rank.paged, saved, strict=True):
                attention.restore(slot, pages)
        self.group.synchronize()

    def set_sampling(self, slot: int, sampling: Sampling, choice: int) -> None:
        """Choose a slot's tokens so in later steps: see `Executor.set_sampling`."""
        changed = [rank.state.set_sampling(slot, sampling, choice) for rank in self.ranks]
        if changed[0]:
            self._leave_flight(slot)

    def take_adapters(
        self, arrays: Sequence[LoraArrays], max_lora_rank: int, adapter_slots: np.ndarray
    ) -> AdapterWriter:
        """Take the arrays of resident adapters, of the one rank: split models take none."""
        (rank,) = self.ranks
        rank.state.adapters = adapter_slots
        self._resident = ResidentAdapters(arrays, max_lora_rank, rank.stream)
        return self._resident

    def _loads(self) -> np.ndarray | None:
        """Return by slot the load that brought its adapter, -1 for none; None where blocks take no adapters."""
        adapter_slots = self.ranks[0].state.adapters
        return None if self._resident is None or adapter_slots is None else self._resident.loads[adapter_slots]

    def _leave_flight(self, slot: int) -> None:
        """Drop a slot's result from the step in flight, which was launched for another request."""
        if self._in_flight is not None:
            self._in_flight.ends.pop(slot, None)

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Run a checked step; return its logits, [len(advances), vocab_size] float32, in the order of the list."""
        return self.tokens_and_logits(advances, range(len(advances)))[1]

    def tokens(self, advances: Sequence[Advance], following: Sequence[Advance]) -> np.ndarray:
        """Run a step and return just the tokens that `set_sampling` asks for.

        They are [len(advances)] int64, -1 where the largest logit is NaN or infinite. following: the step that is
        launched speculatively behind this one: `Model.step_tokens`.
        """
        if any(advance.verifies for advance in advances):
            return self._verify(advances, ())[0]
        with self.group.waiting():
            flight = self._put(advances)
            slots = [advance.slot for advance in advances]
            ahead = following and self.async_scheduling
            launched = self._put_ahead(following, _ends(advances)) if ahead else None
            self._wait(flight)
            found = flight.tokens.copy()
            if launched is None:
                self._tell(slots, found)
            else:
                launched.given = found
            self._in_flight = launched
            return found[slots].astype(np.int64)

    def tokens_and_logits(self, advances: Sequence[Advance], wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Run a step; return its tokens and logits of some requests: see `Executor.tokens_and_logits`."""
        if any(advance.verifies for advance in advances):
            return self._verify(advances, wanted)
        with self.group.waiting():
            flight = self._put(advances)
            self._gather(flight)
            found = [[by_slot[advances[number].slot] for number in wanted] for by_slot in flight.rows]
            logits = self._fetch_logits(self.ranks[0], found[0])
            self._wait(flight)
            if self.group.compares:
                logits = logits.copy()
                for rank, each in zip(self.group.each(), found):
                    self.group.compare("logits", rank, self._fetch_logits(rank, each), logits)
            slots = [advance.slot for advance in advances]
            self._tell(slots, flight.tokens)
            return flight.tokens[slots].astype(np.int64), logits.astype(np.float32)

    def _verify(self, advances: Sequence[Advance], wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Run a step that verifies drafts; return what follows each of its tokens, and logits of some.

        Nothing of it stays in flight: what follows is known when the host has looked at the tokens.
        """
        if any(len(advance.tokens) > 1 and not advance.verifies for advance in advances):
            raise InputError("step: expected no prompts beside drafts, found some; take them in steps of their own")
        rank = self.ranks[0]
        count = sum(advance.num_rows for advance in advances)
        slots = [advance.slot for advance in advances for _ in advance.tokens]
        tokens = np.concatenate([advance.tokens for advance in advances])
        positions = [advance.start + number for advance in advances for number in range(len(advance.tokens))]
        with self.group.waiting():
            self._in_flight = self._prompt = None
            self._begin(advances, self.lengths)
            rank.verified.follow(rank.state, slots)
            rank.verified.decode(range(count), tokens.tolist(), positions, rank.stream)
            for attention in rank.paged:
                attention.begin_verify(slots)
            rows = min(padded_size(count), MOST_VERIFIED)
            self.group.launch([rank.decode_calls(rows, self._adapted(slots), False, verified=True)])
            rank.stream.download(rank.fetched_verified, rank.verified.found)
            logits = self._fetch_logits(rank, [rank.decode_logits(row, verified=True) for row in wanted])
            return rank.fetched_verified[:count].astype(np.int64), logits.astype(np.float32)

    def _fetch_logits(self, rank: Rank, rows: Sequence[cuda.Array]) -> np.ndarray:
        """Wait for rows of logits, and return them in memory that is used again."""
        if self._host_logits is None and rows:
            largest = max(self.num_slots, MOST_VERIFIED)
            self._host_logits = cuda.pinned((largest, rows[0].shape[1]), rows[0].dtype)
        for at, row in enumerate(rows):
            assert self._host_logits is not None
            rank.stream.download(self._host_logits[at : at + 1], row)
        rank.stream.synchronize()
        if self._host_logits is None:
            return np.empty((0, rank.network.vocab_size), np.float32)
        return self._host_logits[: len(rows)]

    def _tell(self, slots: Sequence[int], tokens: np.ndarray) -> None:
        for rank in self.ranks:
            rank.state.tell(slots, tokens)

    def _wait(self, flight: _Flight) -> None:
        """Wait until a step has finished. Raises CheckError where a rank did not come, or found something else."""
        for rank, (tokens, done) in zip(self.ranks, flight.fetched):
            done.wait()
            if rank.exchange is not None:
                rank.exchange.check()
            if self.group.compares:
                self.group.compare("tokens", rank, tokens, flight.tokens)
        if self.group.compares:
            self.group.compare_values()

    def _put(self, advances: Sequence[Advance]) -> _Flight:
        """Put a step on the streams, as far as it is not in flight."""
        decoding, chunks = _split(advances)
        flight = self._in_flight
        self._in_flight = None
        if flight is not None and not self._goes_on(flight, decoding, chunks):
            flight = None  # nobody asks for it any more
        if flight is None:
            self._begin(advances, self.lengths)
            return self._put_passes(decoding, chunks)
        left = [] if flight.chunks else chunks
        if not left:
            return flight
        self._begin(left, self._behind(flight.ends))
        behind = self._put_passes([], left)
        behind.passes += flight.passes
        behind.rows = [before | after for before, after in zip(flight.rows, behind.rows)]
        return behind

    def _goes_on(self, flight: _Flight, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> bool:
        """Return whether the step in flight has all that is asked for, with these tokens and prompts."""
        given = flight.given
        slots = [advance.slot for advance in (*decoding, *chunks)]
        if given is None or not (decoding or flight.chunks):
            return False
        loads = self._loads()
        if loads is not None and flight.loads is not None and (loads[slots] != flight.loads[slots]).any():
            return False
        return all(
            advance.slot not in flight.chunks
            and flight.ends.get(advance.slot) == advance.start + 1
            and given[advance.slot] == advance.tokens[0]
            for advance in decoding
        ) and all(
            chunk.slot in flight.ends and _is_same(chunk, flight.chunks.get(chunk.slot))
            for chunk in (chunks if flight.chunks else ())
        )

    def _put_ahead(self, following: Sequence[Advance], ends: Mapping[int, int]) -> _Flight | None:
        """Launch the next step behind one in which slots come to hold `ends`; None where that cannot be."""
        if any(advance.verifies for advance in following):
            return None
        decoding, chunks = _split(following)
        lengths = self._behind(ends)
        if not self._can_follow(decoding, chunks, ends, lengths):
            return None
        try:
            self._begin(following, lengths)
            flight = self._put_passes(decoding, chunks)
        except (CheckError, InputError):  # no memory for a step that may never be asked for; whoever asks is told
            return None
        finally:
            self._prompt = None  # that was asked for
        flight.loads = self._loads()
        return flight

    def _can_follow(
        self, decoding: Sequence[Advance], chunks: Sequence[Advance], ends: Mapping[int, int], lengths: np.ndarray
    ) -> bool:
        after = _ends((*decoding, *chunks))
        vocab_size = self.ranks[0].network.vocab_size
        return (
            len(after) == len(decoding) + len(chunks)
            and max(after.values()) <= self.max_seq_len
            and len(decoding) + sum(len(chunk.tokens) for chunk in chunks) <= self._max_num_tokens
            and all(each.tokens[0] == FOUND[0] and each.start == ends.get(each.slot) for each in decoding)
            and all(
                0 <= each.slot < self.num_slots
                and each.start == lengths[each.slot]
                and 0 <= each.tokens.min() <= each.tokens.max() < vocab_size
                for each in chunks
            )
        )

    def _put_passes(self, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> _Flight:
        """Put a step for which there is room on the streams, in one pass or in two."""
        self._prompt = None
        ends = _ends((*decoding, *chunks))
        passes = []
        rows = [dict[int, cuda.Array]() for _ in self.ranks]
        if self._goes_in_one_pass(decoding, chunks):
            steps = self._put_pass(decoding, chunks)
            passes.append(steps)
            rows = [{slot: step.logits[slot : slot + 1] for slot in ends} for step in steps]
        else:
            if decoding:
                passes.append(self._decode(decoding))
            if chunks:
                passes.append(self._put_pass([], chunks))
            for number, (rank, by_slot) in enumerate(zip(self.ranks, rows)):
                by_slot |= {advance.slot: rank.decode_logits(advance.slot) for advance in decoding}
                for at, chunk in enumerate(chunks):
                    by_slot[chunk.slot] = passes[-1][number].logits[at : at + 1]
        return _Flight(ends, {chunk.slot: chunk for chunk in chunks}, passes, rows, self._fetch())

    def _gather(self, flight: _Flight) -> None:
        """Gather the logits of a step on the streams where ranks have parts of them."""
        with self.group.together():
            for steps in flight.passes:
                for rank, step in zip(self.group.each(), steps):
                    if step.own_logits is not None:
                        rank.gather(step)

    def _fetch(self) -> list[tuple[np.ndarray, cuda.Event]]:
        """Copy the tokens of the last step on the streams to the host."""
        for rank in self.group.each():
            rank.fetched.reverse()
            tokens, done = rank.fetched[0]
            rank.stream.download(tokens, rank.state.found)
            done.record(rank.stream)
        return [rank.fetched[0] for rank in self.ranks]

    def _behind(self, ends: Mapping[int, int]) -> np.ndarray:
        """Return each slot's tokens behind a step in which some slots come to hold `ends`."""
        lengths = self.lengths.copy()
        lengths[list(ends)] = list(ends.values())
        return lengths

    def warm_up(self) -> None:
        """Run the calls of all steps once, so that no request waits for it.

        This captures the decode graph of each number of rows, runs passes of each size of a graph, of each power of two
        of tokens, alone and several at a time, and beside rows that decode, and products of many numbers of tokens.
        Caches stay as they are.
        """
        self.group.wait_for_weights()
        self.group.reserve({}, self.lengths)
        for rank in self.group.each():
            rank.state.decode([], None, [], rank.stream)
        ways = (False, True) if self._resident is not None and self.ranks[0].has_base else (False,)
        draws = (False, True) if self.ranks[0].splits_logits else (False,)
        most_rows = sorted({bucket(rows, self.num_slots) for rows in range(1, self.num_slots + 1)})
        for count in most_rows:
            for adapted, drawn in itertools.product(ways, draws):
                steps = self._decode_calls(count, adapted, drawn)
                while steps[0].graph is None:
                    self.group.launch(steps)
        longest = min(self._max_num_tokens, self.max_seq_len)
        for tokens in sorted({min(1 << power, longest) for power in range(1, longest.bit_length() + 1)}):
            for batch in range(1, 1 + min(LARGEST_BATCH, self.num_slots)):
                counts = [2] * (batch - 1) + [min(tokens, self._max_num_tokens - 2 * (batch - 1))]
                if counts[-1] > 1 and padded(counts[-1]) == padded(tokens):
                    chunks = [Advance(slot, np.zeros(count, np.int64), 0) for slot, count in enumerate(counts)]
                    for adapted in ways:
                        self._warm_pass(chunks, adapted)
                        if batch == 1:  # which is packed beside rows that decode
                            self._warm_pass(chunks, adapted, [Advance(0, np.zeros(1, np.int64), 0)])
        for rows, adapted in itertools.product(most_rows if longest > 1 else (), ways):
            decoding = [Advance(rows - 1, np.zeros(1, np.int64), 0)]
            self._warm_pass([Advance(0, np.zeros(2, np.int64), 0)], adapted, decoding)
        most = min(self._max_num_tokens, self.num_slots * longest, self.ranks[0].captured_tokens)
        for tokens, adapted in itertools.product(captured_sizes(most) if longest > 1 else (), ways):
            all_tokens = np.zeros(min(tokens, most), np.int64)
            of_each = np.array_split(all_tokens, -(-len(all_tokens) // longest))
            self._warm_pass([Advance(slot, each, 0) for slot, each in enumerate(of_each)], adapted, whole=True)
        for rank, adapted in itertools.product(self.ranks, ways):
            rank.warm_products(adapted)
        self.group.synchronize()
        self.group.check()

    def _warm_pass(
        self, chunks: Sequence[Advance], adapted: bool, decoding: Sequence[Advance] = (), whole: bool = False
    ) -> None:
        """Run a pass that leaves caches as they are, until its graphs are made; whole: that of the whole pass, too."""
        for behind in (False, True, True) if whole else (False, True):
            self._pass(decoding, chunks, adapted, False, write=False, whole=whole and behind)

    def _begin(self, advances: Sequence[Advance], lengths: np.ndarray) -> None:
        """Make room for a step, before which slots hold `lengths` tokens."""
        self.group.wait_for_weights()
        ends = _ends(advances)
        self.group.reserve(ends, lengths)
        self._written |= ends.keys()

    def _decode(self, decoding: Sequence[Advance]) -> list[StepCalls]:
        """Put one token of each slot on the streams; return each rank's calls."""
        slots, positions = zip(*((advance.slot, advance.start) for advance in decoding))
        go_on = decoding[0].tokens[0] < 0  # all, with what the step before finds (`FOUND`), or none
        tokens = None if go_on else [advance.tokens[0] for advance in decoding]
        steps = self._decode_calls(bucket(max(slots) + 1, self.num_slots), self._adapted(slots), self._drawn(slots))
        for rank in self.group.each():
            rank.state.decode(slots, tokens, positions, rank.stream)
        self.group.launch(steps)
        return steps

    def _decode_calls(self, count: int, adapted: bool, drawn: bool) -> list[StepCalls]:
        return [rank.decode_calls(count, adapted, drawn) for rank in self.group.each()]

    def _adapted(self, slots: Iterable[int]) -> bool:
        """Return whether one of these slots is computed with an adapter."""
        adapter_slots = self.ranks[0].state.adapters
        return adapter_slots is not None and bool((adapter_slots[list(slots)] >= 0).any())

    def _drawn(self, slots: Iterable[int]) -> bool:
        """Return whether whole logits are needed: ranks have parts of them, and a token of `slots` is drawn."""
        return self.ranks[0].splits_logits and self.ranks[0].state.draws(slots)

    def _goes_in_one_pass(self, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> bool:
        """Return whether rows that decode and prompts are as fast in one pass as in two.

        Blocks take as long as at the size that their profile is tuned for: 15 rows beside 512 tokens of prompts may
        cost more than both alone, and beside 500 nothing.
        """
        if not decoding or not chunks:
            return False
        rows = 1 + max(each.slot for each in decoding)
        tokens = sum(len(each.tokens) for each in chunks)
        together, first, second = (
            max(_WEIGHTS_BOUND, self.ranks[0].tuned_for(count))
            for count in (rows + tokens, bucket(rows, self.num_slots), tokens)
        )
        return together <= first + second

    def _put_pass(self, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> list[StepCalls]:
        """Put prompts, behind rows that decode, on the streams.

        Each rank's calls have the logits in the order of `chunks`; with rows that decode, by slot.
        """
        ends = _ends((*decoding, *chunks))
        for rank in self.group.each():
            rank.state.send_samplings(rank.stream)
            rank.state.advance(list(ends), list(ends.values()))
        steps = self._pass(decoding, chunks, self._adapted(ends), self._drawn(ends))
        if len(ends) == 1:
            self._prompt = steps, list(ends)
        return steps

    def _pass(
        self,
        decoding: Sequence[Advance],
        chunks: Sequence[Advance],
        adapted: bool,
        drawn: bool,
        write: bool = True,
        whole: bool = False,
    ) -> list[StepCalls]:
        """Put a pass of chunks, behind rows that decode, on the streams.

        write: see `PromptInputs.send`. whole: the next one like it is captured whole, where that may be, though it did
        not come often.
        """
        sent = [rank.send(decoding, chunks, write) for rank in self.group.each()]
        layout = self.ranks[0].layout(*sent[0])
        key = layout, adapted, drawn
        steps = self._captured.get(key)
        if steps is not None:
            self.group.launch(steps)
            return steps
        steps = self.group.run_pass([rank.run_prompts(*each, adapted, drawn) for rank, each in zip(self.ranks, sent)])
        if layout is not None:
            self._came[key] += 1
            if (whole or self._came[key] == _CAPTURED_AFTER) and len(self._captured) < _MOST_CAPTURED:
                self._captured[key] = steps
        return steps


def _split(advances: Sequence[Advance]) -> tuple[list[Advance], list[Advance]]:
    """Split a step, its chunks sorted by length: attention takes prompts of about one length together."""
    decoding, chunks = split(advances)
    return decoding, sorted(chunks, key=lambda chunk: len(chunk.tokens))


def _ends(advances: Sequence[Advance]) -> dict[int, int]:
    """Return by slot the number of tokens that it holds behind the step."""
    return {advance.slot: advance.start + len(advance.tokens) for advance in advances}


def _is_same(chunk: Advance, other: Advance | None) -> bool:
    return other is not None and chunk.start == other.start and np.array_equal(chunk.tokens, other.tokens)
