"""The executor on GPUs: it runs the engines of a network in the order of the CPU's step, on device arrays.

A decode step is one CUDA graph for each (number of rows, capacity of the cache): embedding, blocks, attention, cache
writes, logits, next tokens. The graph runs rows 0 up to a power of two, whichever slots decode; rows that don't decode
write nothing. Prompts run as a prefill pass, enqueued call by call: the device computes the first layers while the host
prepares the next ones. A pass is padded to one of a few sizes (`PromptInputs`), so that most of its calls are CUDA
graphs (`Part`). Rows that decode in the same step join the pass if that is no slower, so that the weights are read
once; their attention is that of a decode step.

The device samples the tokens. If the caller wants only tokens, no logits are copied to the host, and the next step
reads its inputs from the device. A caller that can predict the next step names it, and the step is launched
speculatively: it is enqueued before this step's tokens are on the host, so the device never waits for the host. Its
results for rows that the caller then doesn't want are dropped; additional prompts follow in another pass.

A step that verifies drafts is a decode step whose rows are tokens of any slots. Each row uses its slot's page table,
and the keys and values of all rows are written before any are read.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.step.advance import PREVIOUS_TOKEN, Advance
from lockstep.step.logits_pipeline import Sampler
from lockstep.step.network import LayerAttention, Network
from lockstep.step.observer import Observer
from lockstep.step.packing import split
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Logprobs
from lockstep.weights.adapters import AdapterWriter, LoraArrays
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import LARGEST_BATCH, padded
from lockstep_gpu.prompts import bucket, captured_sizes, padded_size
from lockstep_gpu.ranks.group import RankGroup
from lockstep_gpu.ranks.rank import MAX_VERIFY_TOKENS, Rank, StepCalls
from lockstep_gpu.resident_adapters import ResidentAdapters

_MAX_CAPTURED_PASSES = 128
# A pass is captured whole when its layout has come this often: capturing costs the host as much as this many replays
# save.
CAPTURED_AFTER = 16
# Tokens: a shorter pass is bound by reading the weights (7B shape, H200, fp16).
_WEIGHTS_BOUND = 192


@dataclass
class _InFlightStep:
    """An enqueued step."""

    lengths: dict[int, int]  # by slot: the tokens that it holds after the step
    chunks: dict[int, Advance]  # by slot: its prompt
    passes: list[list[StepCalls]]  # by pass, by rank
    logits: list[dict[int, cuda.Array]]  # by rank, by slot: [1, vocab_size], valid until the next step
    # By rank: next tokens and log-probabilities (of the first rank) by slot, page-locked, valid after the event.
    fetched: list[tuple[np.ndarray, np.ndarray, cuda.Event]]
    # Of a speculative launch only: the previous step's tokens by slot, and the adapter loads that it ran with.
    previous_tokens: np.ndarray | None = None
    adapter_loads: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Return the first rank's tokens, by slot."""
        return self.fetched[0][0]


class GpuExecutor:
    """An `Executor` of a network whose engines are GPU programs.

    Several ranks run the same step, each on its device; the first rank's tokens and logits are returned.
    """

    processes_logits = True

    def __init__(
        self, network: Network, num_slots: int, max_seq_len: int, max_num_tokens: int, kv_bytes: float | None = None
    ):
        """Allocate the KV cache; kv_bytes: its size on each device, see `attention.make.make_tables`."""
        cuda.leak_at_exit(self)
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.lengths = np.zeros(num_slots, np.int64)
        # Slots that a step may have written since their last reset, even if it failed and their length is still 0.
        self._written: set[int] = set()
        self.group = RankGroup(network, num_slots, max_seq_len, max_num_tokens, kv_bytes)
        self.ranks = self.group.ranks
        self.tables = self.group.tables
        self._max_num_tokens = max_num_tokens
        self._in_flight: _InFlightStep | None = None  # launched speculatively, not taken yet
        self.logprobs: dict[int, Logprobs] = {}
        # The calls and slots of the last step, if it had a single prompt: for `benchmarks.step_timing`.
        self._last_prompt: tuple[list[StepCalls], list[int]] | None = None
        # Prefill passes by (layout, adapted, drawn): how often they came, and those that are captured whole.
        self._pass_counts = Counter[tuple]()
        self.captured = dict[tuple, list[StepCalls]]()
        self._host_logits: np.ndarray | None = None
        self._observed = False
        self._resident: ResidentAdapters | None = None  # keeps memory alive that copies on the stream read
        # A speculative step that is dropped leaves only keys and values, which the next step overwrites. It would
        # advance the state of a recurrent mixer for good.
        self.async_scheduling = all(isinstance(mixer, LayerAttention) for _, mixer in network.layers)

    def __del__(self) -> None:
        if hasattr(self, "group"):
            self.group.drain()  # kernels may still use the memory that is freed now

    @property
    def in_flight(self) -> bool:
        """Return whether a step was launched speculatively and not taken yet."""
        return self._in_flight is not None

    @property
    def max_verify_tokens(self) -> int:
        """Return the most tokens of a step that verifies drafts: see `Executor.max_verify_tokens`."""
        fused = len(self.ranks) == 1 and self.tables.shares
        return min(MAX_VERIFY_TOKENS, self._max_num_tokens) if fused else 0

    def room(self, length: int) -> int:
        """Return how many tokens fit after `length` in the slot's pages, and in one more if many pages are free."""
        spare = PAGE_SIZE if self.tables.pool.num_available > 2 * self.num_slots else 0
        return min(self.tables.pages_for(length) * PAGE_SIZE + spare, self.max_seq_len) - length

    def keep(self, slot: int, length: int) -> None:
        """Truncate a slot to `length` tokens; stale keys and values in its pages are never read."""
        self.lengths[slot] = length

    def reset(self, slot: int) -> None:
        """Clear a slot and release its pages."""
        if slot in self._written:
            for rank in self.group.on_each_device():
                for attention in rank.attentions:
                    attention.reset(slot)
        self._written.discard(slot)
        self._drop_in_flight(slot)
        self.tables.release(slot)
        self.lengths[slot] = 0

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Start the slot's page table with `pages`; nothing is copied."""
        self._written.add(slot)

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        raise AssertionError("a prefix is not copied: its pages are in the slot's table")

    def fork(self, slot: int, other: int) -> None:
        """Copy a slot's last, partly filled page; the full pages are shared."""
        self._written.add(other)
        for rank in self.group.on_each_device():
            for attention in rank.paged:
                attention.fork(slot, other, int(self.lengths[slot]))

    def move(self, slot: int, other: int) -> None:
        """Give a slot's pages to another slot; nothing is copied."""
        self._in_flight = self._last_prompt = None
        for rank in self.group.on_each_device():
            for attention in rank.paged:
                attention.reset(slot)
                attention.reset(other)
        self._written.discard(slot)
        self._written.add(other)
        self.lengths[other] = self.lengths[slot]
        self.lengths[slot] = 0

    def swap_out(self, slot: int) -> list[list[np.ndarray]]:
        """Copy the slot's pages to page-locked memory and reset the slot; return the copies, by rank."""
        length = int(self.lengths[slot])
        swapped = []
        for rank in self.group.on_each_device():
            swapped.append([attention.save(slot, length) for attention in rank.paged])
        self.group.synchronize()
        self.reset(slot)
        return swapped

    def swap_in(self, slot: int, swapped: Sequence[Sequence[np.ndarray]]) -> None:
        """Copy swapped pages into the slot's new pages."""
        self._written.add(slot)
        for rank, saved in zip(self.group.on_each_device(), swapped, strict=True):
            for attention, pages in zip(rank.paged, saved, strict=True):
                attention.restore(slot, pages)
        self.group.synchronize()

    def observe(self, observer: Observer | None) -> None:
        """Show later steps to an observer, none of them launched speculatively: see `Executor.observe`."""
        (rank,) = self.ranks  # nobody observes sharded models
        self._in_flight = self._last_prompt = None
        self._observed = observer is not None
        rank.observe(observer)

    def set_sampling(self, slot: int, sampler: Sampler) -> None:
        """Set how a slot's tokens are chosen in later steps: see `Executor.set_sampling`."""
        changed = [rank.state.set_sampling(slot, sampler) for rank in self.ranks]
        if changed[0]:
            self._drop_in_flight(slot)

    def _set_masks(self, advances: Sequence[Advance]) -> None:
        """Set the masks that a step brings; a step in flight of their slots is of other ones."""
        for advance in advances:
            if advance.masks is not None:
                self._drop_in_flight(advance.slot)
                for rank in self.ranks:
                    rank.state.set_masks(advance.slot, advance.masks)

    def take_adapters(
        self, arrays: Sequence[LoraArrays], max_lora_rank: int, adapter_slots: np.ndarray
    ) -> AdapterWriter:
        """Set the arrays of resident adapters: see `Executor.take_adapters`."""
        (rank,) = self.ranks  # sharded models take no adapters
        rank.state.adapters = adapter_slots
        self._resident = ResidentAdapters(arrays, max_lora_rank, rank.stream)
        return self._resident

    def _adapter_loads(self) -> np.ndarray | None:
        """Return by slot the number of its adapter's load, -1 for none; None if blocks take no adapters."""
        adapter_slots = self.ranks[0].state.adapters
        if self._resident is None or adapter_slots is None:
            return None
        return self._resident.loads[adapter_slots]

    def _drop_in_flight(self, slot: int) -> None:
        """Drop a slot's result from the step in flight: the slot's request has changed."""
        if self._in_flight is not None:
            self._in_flight.lengths.pop(slot, None)

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Run a checked step; return its logits, [len(advances), vocab_size] float32, in the order of `advances`."""
        return self.tokens_and_logits(advances, range(len(advances)))[1]

    def tokens(self, advances: Sequence[Advance], following: Sequence[Advance]) -> np.ndarray:
        """Run a step and return only its tokens, [len(advances)] int64: see `Executor.tokens`.

        following: the step to launch speculatively after this one: see `Model.step_tokens`.
        """
        if any(advance.verifies for advance in advances):
            return self._verify(advances, ())[0]
        with self.group.waiting():
            step = self._enqueue(advances)
            next_step = None
            self._set_masks(following)
            if following and self.async_scheduling and not self._observed:
                next_step = self._enqueue_speculatively(following, _lengths_after(advances))
            self._wait(step)
            tokens = step.tokens.copy()
            slots = [advance.slot for advance in advances]
            if next_step is None:
                self._set_tokens(slots, tokens)
            else:
                next_step.previous_tokens = tokens
            self._in_flight = next_step
            self._read_logprobs(step, slots)
            return tokens[slots].astype(np.int64)

    def tokens_and_logits(
        self, advances: Sequence[Advance], logit_rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run a step; return its tokens, and the logits of some requests: see `Executor.tokens_and_logits`."""
        if any(advance.verifies for advance in advances):
            return self._verify(advances, logit_rows)
        with self.group.waiting():
            step = self._enqueue(advances)
            self._gather(step)
            logit_slots = [advances[row].slot for row in logit_rows]
            logits = self._fetch_logits(self.ranks[0], [step.logits[0][slot] for slot in logit_slots])
            self._wait(step)
            if self.group.compares:
                logits = logits.copy()
                for rank, by_slot in zip(self.group.on_each_device(), step.logits):
                    rank_logits = self._fetch_logits(rank, [by_slot[slot] for slot in logit_slots])
                    self.group.compare("logits", rank, rank_logits, logits)
            slots = [advance.slot for advance in advances]
            self._set_tokens(slots, step.tokens)
            self._read_logprobs(step, slots)
            return step.tokens[slots].astype(np.int64), logits.astype(np.float32)

    def _verify(self, advances: Sequence[Advance], logit_rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Run a step that verifies drafts; return the next token after each of its tokens, and some logits.

        No step is launched speculatively after it: the next step depends on the drafts that the host accepts.
        """
        if any(len(advance.tokens) > 1 and not advance.verifies for advance in advances):
            raise InputError("step: expected no prompts beside drafts, found some; take them in steps of their own")
        rank = self.ranks[0]
        slots: list[int] = []
        positions: list[int] = []
        for advance in advances:
            slots += [advance.slot] * len(advance.tokens)
            positions += range(advance.start, advance.start + len(advance.tokens))
        tokens = np.concatenate([advance.tokens for advance in advances])
        count = len(tokens)
        with self.group.waiting():
            self._in_flight = self._last_prompt = None
            self.logprobs = {}
            self._reserve(advances, self.lengths)
            rank.verify_state.copy_slots(rank.state, slots)
            rank.verify_state.decode(range(count), tokens.tolist(), positions, rank.stream)
            for attention in rank.paged:
                attention.begin_verify(slots)
            rows = min(padded_size(count), MAX_VERIFY_TOKENS)
            self.group.launch([rank.decode_calls(rows, self._adapted(slots), False, verifies=True)])
            rank.stream.download(rank.fetched_verified, rank.verify_state.next_tokens)
            logits = self._fetch_logits(rank, [rank.decode_logits(row, verifies=True) for row in logit_rows])
            return rank.fetched_verified[:count].astype(np.int64), logits.astype(np.float32)

    def _fetch_logits(self, rank: Rank, rows: Sequence[cuda.Array]) -> np.ndarray:
        """Wait for rows of logits and return them, in a buffer that the next call overwrites."""
        if self._host_logits is None and rows:
            max_rows = max(self.num_slots, MAX_VERIFY_TOKENS)
            self._host_logits = cuda.pinned((max_rows, rows[0].shape[1]), rows[0].dtype)
        for index, row in enumerate(rows):
            assert self._host_logits is not None
            rank.stream.download(self._host_logits[index : index + 1], row)
        rank.stream.synchronize()
        if self._host_logits is None:
            return np.empty((0, rank.network.vocab_size), np.float32)
        return self._host_logits[: len(rows)]

    def _set_tokens(self, slots: Sequence[int], tokens: np.ndarray) -> None:
        for rank in self.ranks:
            rank.state.set_tokens(slots, tokens)

    def _wait(self, step: _InFlightStep) -> None:
        """Wait until a step is done. Raises CheckError if a rank is missing, or if its results differ."""
        for rank, (tokens, _, done) in zip(self.ranks, step.fetched):
            done.wait()
            if rank.exchange is not None:
                rank.exchange.check()
            if self.group.compares:
                self.group.compare("tokens", rank, tokens, step.tokens)
        if self.group.compares:
            self.group.compare_values()

    def _read_logprobs(self, step: _InFlightStep, slots: Sequence[int]) -> None:
        self.logprobs = self.ranks[0].state.logprobs(step.fetched[0][1], slots)

    def _enqueue(self, advances: Sequence[Advance]) -> _InFlightStep:
        """Enqueue a step, or what the step in flight lacks of it."""
        self._set_masks(advances)
        decoding, chunks = _split(advances)
        step = self._in_flight
        self._in_flight = None
        if step is None or not self._matches(step, decoding, chunks):
            self._reserve(advances, self.lengths)
            return self.enqueue_passes(decoding, chunks)
        if step.chunks or not chunks:
            return step
        # The speculative step had no prompts: they follow in another pass.
        self._reserve(chunks, self._slot_lengths(step.lengths))
        chunk_step = self.enqueue_passes([], chunks)
        chunk_step.passes += step.passes
        chunk_step.logits = [before | after for before, after in zip(step.logits, chunk_step.logits)]
        return chunk_step

    def _matches(self, step: _InFlightStep, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> bool:
        """Return whether the step in flight computes these decoding rows, and these chunks if it has any."""
        previous_tokens = step.previous_tokens
        if previous_tokens is None or not (decoding or step.chunks):
            return False
        slots = [advance.slot for advance in (*decoding, *chunks)]
        loads = self._adapter_loads()
        if loads is not None and step.adapter_loads is not None and (loads[slots] != step.adapter_loads[slots]).any():
            return False
        for advance in decoding:
            is_next = step.lengths.get(advance.slot) == advance.start + 1 and advance.slot not in step.chunks
            if not is_next or previous_tokens[advance.slot] != advance.tokens[0]:
                return False
        if not step.chunks:
            return True
        return all(chunk.slot in step.lengths and _is_same(chunk, step.chunks.get(chunk.slot)) for chunk in chunks)

    def _enqueue_speculatively(
        self, following: Sequence[Advance], lengths_after: Mapping[int, int]
    ) -> _InFlightStep | None:
        """Enqueue the step after one that leaves `lengths_after` tokens in its slots; None if that isn't possible."""
        if any(advance.verifies for advance in following):
            return None
        decoding, chunks = _split(following)
        lengths = self._slot_lengths(lengths_after)
        if not self._can_follow(decoding, chunks, lengths_after, lengths):
            return None
        try:
            self._reserve(following, lengths)
            step = self.enqueue_passes(decoding, chunks)
        except (CheckError, InputError):
            return None  # out of memory for a step that may never be needed; if it is, its caller gets the error
        finally:
            self._last_prompt = None  # the current step's
        step.adapter_loads = self._adapter_loads()
        return step

    def _can_follow(
        self,
        decoding: Sequence[Advance],
        chunks: Sequence[Advance],
        previous_lengths: Mapping[int, int],
        lengths: np.ndarray,
    ) -> bool:
        """Return whether a speculative step is valid: `Model` has not checked it yet.

        previous_lengths: by slot of the previous step, its tokens after that step. lengths: of all slots.
        """
        lengths_after = _lengths_after((*decoding, *chunks))
        num_tokens = len(decoding) + sum(len(chunk.tokens) for chunk in chunks)
        if len(lengths_after) < len(decoding) + len(chunks):  # two advances of a slot
            return False
        if max(lengths_after.values()) > self.max_seq_len or num_tokens > self._max_num_tokens:
            return False
        for advance in decoding:
            if advance.tokens[0] != PREVIOUS_TOKEN[0] or advance.start != previous_lengths.get(advance.slot):
                return False
        vocab_size = self.ranks[0].network.vocab_size
        for chunk in chunks:
            if not 0 <= chunk.slot < self.num_slots or chunk.start != lengths[chunk.slot]:
                return False
            if not 0 <= chunk.tokens.min() <= chunk.tokens.max() < vocab_size:
                return False
        return True

    def enqueue_passes(self, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> _InFlightStep:
        """Enqueue a step that room was reserved for, in one pass or in two."""
        self._last_prompt = None
        lengths = _lengths_after((*decoding, *chunks))
        passes = []
        logits = [dict[int, cuda.Array]() for _ in self.ranks]
        if self._fits_one_pass(decoding, chunks):
            steps = self._enqueue_pass(decoding, chunks)
            passes.append(steps)
            logits = [{slot: step.logits[slot : slot + 1] for slot in lengths} for step in steps]
        else:
            if decoding:
                passes.append(self._enqueue_decode(decoding))
            if chunks:
                passes.append(self._enqueue_pass([], chunks))
            for number, (rank, by_slot) in enumerate(zip(self.ranks, logits)):
                by_slot |= {advance.slot: rank.decode_logits(advance.slot) for advance in decoding}
                for row, chunk in enumerate(chunks):
                    by_slot[chunk.slot] = passes[-1][number].logits[row : row + 1]
        by_slot_chunks = {chunk.slot: chunk for chunk in chunks}
        return _InFlightStep(lengths, by_slot_chunks, passes, logits, self._fetch_tokens())

    def _gather(self, step: _InFlightStep) -> None:
        """Gather the logits of an enqueued step if they are sharded over the ranks."""
        with self.group.together():
            for rank_calls in step.passes:
                for rank, calls in zip(self.group.on_each_device(), rank_calls):
                    if calls.shard_logits is not None:
                        rank.gather(calls)

    def _fetch_tokens(self) -> list[tuple[np.ndarray, np.ndarray, cuda.Event]]:
        """Enqueue the copies of the last step's tokens and log-probabilities to the host."""
        for rank in self.group.on_each_device():
            rank.fetched.reverse()
            tokens, logprobs, done = rank.fetched[0]
            rank.stream.download(tokens, rank.state.next_tokens)
            if rank is self.ranks[0] and rank.state.tells_logprobs:
                rank.stream.download(logprobs, rank.state.logits_tables.logprobs)
            done.record(rank.stream)
        return [rank.fetched[0] for rank in self.ranks]

    def _slot_lengths(self, changed: Mapping[int, int]) -> np.ndarray:
        """Return the tokens that each slot holds after a step that changes those of some slots."""
        lengths = self.lengths.copy()
        lengths[list(changed)] = list(changed.values())
        return lengths

    def warm_up(self) -> None:
        """Run all calls once, so that no request waits for a graph capture or a library's first call.

        This captures the decode graph of each number of rows. It runs a prefill pass of each graph's size, of each
        power of two of tokens, with one and with several prompts, and with rows that decode, and GEMMs of many sizes.
        Caches don't change.
        """
        self.group.wait_for_weights()
        self.group.reserve({}, self.lengths)
        for rank in self.group.on_each_device():
            rank.state.decode([], None, [], rank.stream)
        adapted_choices = [False]
        if self._resident is not None and self.ranks[0].has_base:
            adapted_choices.append(True)
        row_buckets = sorted({bucket(rows, self.num_slots) for rows in range(1, self.num_slots + 1)})
        self._warm_decode(row_buckets, adapted_choices)
        for adapted in adapted_choices:
            self._warm_prefill(row_buckets, adapted)
            for rank in self.ranks:
                rank.warm_products(adapted)
        self.group.synchronize()
        self.group.check()

    def _warm_decode(self, row_buckets: Sequence[int], adapted_choices: Sequence[bool]) -> None:
        drawn_choices = (False, True) if self.ranks[0].splits_logits else (False,)
        for count, adapted, drawn in itertools.product(row_buckets, adapted_choices, drawn_choices):
            steps = self.decode_calls(count, adapted, drawn)
            while steps[0].graph is None:
                self.group.launch(steps)

    def _warm_prefill(self, row_buckets: Sequence[int], adapted: bool) -> None:
        longest = min(self._max_num_tokens, self.max_seq_len)
        for tokens in sorted({min(1 << power, longest) for power in range(1, longest.bit_length() + 1)}):
            for batch in range(1, 1 + min(LARGEST_BATCH, self.num_slots)):
                last = min(tokens, self._max_num_tokens - 2 * (batch - 1))
                if last < 2 or padded(last) != padded(tokens):
                    continue
                chunks = [_dummy(slot, 2) for slot in range(batch - 1)]
                chunks.append(_dummy(batch - 1, last))
                self._warm_pass(chunks, adapted)
                if batch == 1:  # with a row that decodes, attention of the prompt is a packed call
                    self._warm_pass(chunks, adapted, [_dummy(0, 1)])
        if longest < 2:
            return
        for rows in row_buckets:
            self._warm_pass([_dummy(0, 2)], adapted, [_dummy(rows - 1, 1)])
        max_tokens = min(self._max_num_tokens, self.num_slots * longest, self.ranks[0].captured_tokens)
        for tokens in captured_sizes(max_tokens):
            all_tokens = np.zeros(min(tokens, max_tokens), np.int64)
            prompts = np.array_split(all_tokens, -(-len(all_tokens) // longest))
            chunks = [Advance(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
            self._warm_pass(chunks, adapted, capture=True)

    def _warm_pass(
        self, chunks: Sequence[Advance], adapted: bool, decoding: Sequence[Advance] = (), capture: bool = False
    ) -> None:
        """Run a pass that changes no cache until its graphs are captured; capture: the graph of the whole pass, too."""
        self._run_pass(decoding, chunks, adapted, False, write=False)
        self._run_pass(decoding, chunks, adapted, False, write=False, capture=capture)
        if capture:
            self._run_pass(decoding, chunks, adapted, False, write=False, capture=True)

    def _reserve(self, advances: Sequence[Advance], lengths: np.ndarray) -> None:
        """Reserve pages for a step; lengths: the tokens that each slot holds before it."""
        self.group.wait_for_weights()
        lengths_after = _lengths_after(advances)
        self.group.reserve(lengths_after, lengths)
        self._written |= lengths_after.keys()

    def _enqueue_decode(self, decoding: Sequence[Advance]) -> list[StepCalls]:
        """Enqueue one token of each slot; return each rank's calls."""
        slots = [advance.slot for advance in decoding]
        positions = [advance.start for advance in decoding]
        tokens = None
        if decoding[0].tokens[0] >= 0:  # else all are `PREVIOUS_TOKEN`
            tokens = [advance.tokens[0] for advance in decoding]
        steps = self.decode_calls(bucket(max(slots) + 1, self.num_slots), self._adapted(slots), self._drawn(slots))
        for rank in self.group.on_each_device():
            rank.state.decode(slots, tokens, positions, rank.stream)
        self.group.launch(steps)
        return steps

    def decode_calls(self, count: int, adapted: bool, drawn: bool) -> list[StepCalls]:
        return [rank.decode_calls(count, adapted, drawn) for rank in self.group.on_each_device()]

    def _adapted(self, slots: Iterable[int]) -> bool:
        """Return whether one of these slots has an adapter."""
        adapter_slots = self.ranks[0].state.adapters
        return adapter_slots is not None and bool((adapter_slots[list(slots)] >= 0).any())

    def _drawn(self, slots: Iterable[int]) -> bool:
        """Return whether sharded logits must be gathered on the device, because a token of `slots` is drawn."""
        return self.ranks[0].splits_logits and self.ranks[0].state.draws(slots)

    def _fits_one_pass(self, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> bool:
        """Return whether one pass of decoding rows and prompts is as fast as two.

        A block costs as much as its profile's tuned size: 15 rows with 512 tokens of prompts may cost more than the
        two alone, and with 500 tokens nothing.
        """
        if not decoding or not chunks:
            return False
        rows = 1 + max(advance.slot for advance in decoding)
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        decode_cost = self._cost(bucket(rows, self.num_slots))
        return self._cost(rows + tokens) <= decode_cost + self._cost(tokens)

    def _cost(self, num_tokens: int) -> int:
        """Return the cost of a pass, in tokens."""
        return max(_WEIGHTS_BOUND, self.ranks[0].tuned_for(num_tokens))

    def _enqueue_pass(self, decoding: Sequence[Advance], chunks: Sequence[Advance]) -> list[StepCalls]:
        """Enqueue a prefill pass, with rows that decode before the prompts; return each rank's calls.

        Their logits are in the order of `chunks`, or by slot if rows decode.
        """
        lengths = _lengths_after((*decoding, *chunks))
        for rank in self.group.on_each_device():
            rank.state.send_samplings(rank.stream)
            rank.state.advance(list(lengths), list(lengths.values()))
        steps = self._run_pass(decoding, chunks, self._adapted(lengths), self._drawn(lengths))
        if len(lengths) == 1:
            self._last_prompt = steps, list(lengths)
        return steps

    def _run_pass(
        self,
        decoding: Sequence[Advance],
        chunks: Sequence[Advance],
        adapted: bool,
        drawn: bool,
        write: bool = True,
        capture: bool = False,
    ) -> list[StepCalls]:
        """Run a prefill pass, as one graph if its layout was captured.

        write: see `PromptInputs.send`. capture: capture the next pass of this layout whole, however often it came.
        """
        inputs = [rank.send(decoding, chunks, write) for rank in self.group.on_each_device()]
        layout = self.ranks[0].layout(*inputs[0])
        key = layout, adapted, drawn
        steps = self.captured.get(key)
        if steps is not None:
            self.group.launch(steps)
            return steps
        passes = [rank.run_prompts(*rank_inputs, adapted, drawn) for rank, rank_inputs in zip(self.ranks, inputs)]
        steps = self.group.run_pass(passes)
        if layout is not None:
            self._pass_counts[key] += 1
            is_due = capture or self._pass_counts[key] == CAPTURED_AFTER
            if is_due and len(self.captured) < _MAX_CAPTURED_PASSES:
                self.captured[key] = steps
        return steps


def _split(advances: Sequence[Advance]) -> tuple[list[Advance], list[Advance]]:
    """Split a step into decoding rows and chunks, sorted by length: attention batches prompts of similar length."""
    decoding, chunks = split(advances)
    return decoding, sorted(chunks, key=lambda chunk: len(chunk.tokens))


def _lengths_after(advances: Sequence[Advance]) -> dict[int, int]:
    """Return by slot the number of tokens that it holds after the step."""
    return {advance.slot: advance.start + len(advance.tokens) for advance in advances}


def _dummy(slot: int, count: int) -> Advance:
    """Return `count` tokens for a warm-up pass."""
    return Advance(slot, np.zeros(count, np.int64), 0)


def _is_same(chunk: Advance, other: Advance | None) -> bool:
    return other is not None and chunk.start == other.start and np.array_equal(chunk.tokens, other.tokens)
