"""The executor on GPUs: it runs the engines of a network in the order of the CPU's step, on device arrays.

What a step computes is a plan (`plan.py`); the runner enqueues it on the devices (`runner.py`). Here are the slots, and
what is launched speculatively.

The device samples the tokens. If the caller wants only tokens, no logits are copied to the host, and the next step
reads its inputs from the device. A caller that can predict the next step names it, and the step is launched
speculatively: it is enqueued before this step's tokens are on the host, so the device never waits for the host. Its
results for rows that the caller then doesn't want are dropped; additional prompts follow in another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.step.advance import Advance, Load, Observer, PackedTokens
from lockstep.step.logits_pipeline import Sampler
from lockstep.step.network import LayerAttention, Network
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Logprobs
from lockstep.weights.adapters import AdapterWriter, LoraArrays
from lockstep_gpu import cuda
from lockstep_gpu.plan import MAX_VERIFY_TOKENS, StepPlan
from lockstep_gpu.resident_adapters import ResidentAdapters
from lockstep_gpu.runner import EnqueuedStep, StepRunner
from lockstep_gpu.weights import preload, replace_weights

_LOADER = ThreadPoolExecutor(1, "weights")  # one load at a time has all of the bus


class DeviceLoad:
    """Weights that are copied in another thread: see `Executor.load`."""

    def __init__(self, copies: Future[None]):
        self._copies = copies

    def done(self) -> bool:
        return self._copies.done()

    def finish(self) -> None:
        self._copies.result()


class GpuExecutor:
    """An `Executor` of networks whose engines are GPU programs.

    Several ranks run the same step, each on its device; the first rank's tokens and logits are returned.
    """

    processes_logits = True

    def __init__(
        self,
        networks: Sequence[Network],
        num_slots: int,
        max_seq_len: int,
        max_num_tokens: int,
        kv_bytes: float | None = None,
    ):
        """Allocate the KV cache; kv_bytes: its size on each device, see `attention.make.make_tables`."""
        cuda.leak_at_exit(self)
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.lengths = np.zeros(num_slots, np.int64)
        # Slots that a step may have written since their last reset, even if it failed and their length is still 0.
        self._written: set[int] = set()
        self.runner = StepRunner(networks, num_slots, max_seq_len, max_num_tokens, kv_bytes)
        self.ranks = self.runner.ranks
        self.tables = self.runner.tables
        self._in_flight: EnqueuedStep | None = None  # launched speculatively, not taken yet
        # The last step, if none was enqueued after it: for `benchmarks.step_timing`.
        self.last_step: EnqueuedStep | None = None
        self.logprobs: dict[int, Logprobs] = {}
        self._observed = False
        self._resident: ResidentAdapters | None = None  # keeps memory alive that copies on the stream read
        # A speculative step that is dropped leaves only keys and values, which the next step overwrites. It would
        # advance the state of a recurrent mixer for good.
        self.async_scheduling = all(isinstance(mixer, LayerAttention) for _, mixer in networks[0].layers)

    def __del__(self) -> None:
        if hasattr(self, "runner"):
            self.runner.drain()  # kernels may still use the memory that is freed now

    @property
    def in_flight(self) -> bool:
        """Return whether a step was launched speculatively and not taken yet."""
        return self._in_flight is not None

    def drop_step(self) -> None:
        """Drop the step in flight, and the record of the last one."""
        self._in_flight = self.last_step = None

    @property
    def max_verify_tokens(self) -> int:
        """Return the most tokens of a step that verifies drafts: see `Executor.max_verify_tokens`."""
        fused = len(self.ranks) == 1 and self.tables.shares
        return min(MAX_VERIFY_TOKENS, self.runner.limits.max_num_tokens) if fused else 0

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
            for rank in self.runner.on_each_device():
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
        for rank in self.runner.on_each_device():
            for attention in rank.paged:
                attention.fork(slot, other, int(self.lengths[slot]))

    def move(self, slot: int, other: int) -> None:
        """Give a slot's pages to another slot; nothing is copied."""
        self.drop_step()
        for rank in self.runner.on_each_device():
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
        for rank in self.runner.on_each_device():
            swapped.append([attention.save(slot, length) for attention in rank.paged])
        self.runner.synchronize()
        self.reset(slot)
        return swapped

    def swap_in(self, slot: int, swapped: Sequence[Sequence[np.ndarray]]) -> None:
        """Copy swapped pages into the slot's new pages."""
        self._written.add(slot)
        for rank, saved in zip(self.runner.on_each_device(), swapped, strict=True):
            for attention, pages in zip(rank.paged, saved, strict=True):
                attention.restore(slot, pages)
        self.runner.synchronize()

    def observe(self, observer: Observer | None) -> None:
        """Show later steps to an observer, none of them launched speculatively: see `Executor.observe`."""
        (rank,) = self.ranks  # nobody observes sharded models
        self.drop_step()
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

    def load(self, network: int, weights_json: Path, bind: Callable[[Path], Network]) -> Load:
        """Copy the weights of another checkpoint to the fixed addresses of a network's, so that its graphs stay valid.

        Raises InputError for a model that is split over ranks.
        """
        if self._in_flight is not None and self._in_flight.plan.network == network:
            self.drop_step()
        if len(self.ranks) > 1:
            raise InputError("weights: expected a model on one GPU, found one that is split over several; restart it")
        (rank,) = self.ranks
        used = cuda.Event()  # by steps that are enqueued, though their requests have ended
        used.record(rank.stream)
        stores = [uploads.store for uploads in self.runner.uploads[network]]
        return DeviceLoad(_LOADER.submit(replace_weights, stores, weights_json, used))

    def preload(self, checkpoints: Sequence[Path]) -> Iterator[None]:
        """Read weights into page-locked host memory, in parts: see `Executor.preload`."""
        return preload([uploads.store for uploads in self.runner.uploads[0]], checkpoints)

    def take_adapters(
        self, networks: Sequence[Sequence[LoraArrays]], max_lora_rank: int, adapter_slots: np.ndarray
    ) -> AdapterWriter:
        """Set the arrays of resident adapters: see `Executor.take_adapters`."""
        (rank,) = self.ranks  # sharded models take no adapters
        rank.state.adapters = adapter_slots
        self._resident = ResidentAdapters(networks, max_lora_rank, rank.stream)
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
            self._in_flight.plan.lengths.pop(slot, None)

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Run a checked step; return its logits, [len(advances), vocab_size] float32, in the order of `advances`."""
        return self.tokens_and_logits(advances, range(len(advances)))[1]

    def tokens(self, advances: Sequence[Advance], following: Sequence[Advance]) -> np.ndarray:
        """Run a step and return only its tokens, [len(advances)] int64: see `Executor.tokens`.

        following: the step to launch speculatively after this one: see `Model.step_tokens`.
        """
        if any(advance.verifies for advance in advances):
            return self._verify(advances, ())[0]
        with self.runner.waiting():
            plan, step = self._enqueue(advances)
            next_step = None
            self._set_masks(following)
            if following and self.async_scheduling and not self._observed:
                next_step = self._enqueue_speculatively(following, plan)
            self.runner.wait(step)
            if next_step is not None:
                next_step.previous_tokens = step.tokens.copy()
                for advance in next_step.plan.decoding:
                    if advance.tokens[0] >= 0:  # of a network other than this step's
                        next_step.previous_tokens[advance.slot] = advance.tokens[0]
            self._in_flight = next_step
            return self._take_tokens(step, advances, is_newest=next_step is None)

    def tokens_and_logits(
        self, advances: Sequence[Advance], logit_rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run a step; return its tokens, and the logits of some requests: see `Executor.tokens_and_logits`."""
        if any(advance.verifies for advance in advances):
            return self._verify(advances, logit_rows)
        with self.runner.waiting():
            _, step = self._enqueue(advances)
            logits = self.runner.logits(step, [advances[row].slot for row in logit_rows])
            return self._take_tokens(step, advances, is_newest=True), logits.astype(np.float32)

    def _take_tokens(self, step: EnqueuedStep, advances: Sequence[Advance], is_newest: bool) -> np.ndarray:
        """Return the tokens of a step that is done; is_newest: no step was enqueued after it."""
        slots = [advance.slot for advance in advances]
        self.last_step = step if is_newest else None
        if is_newest:
            for rank in self.ranks:
                rank.state.set_tokens(slots, step.tokens)
        self.logprobs = self.ranks[0].state.logprobs(step.fetched[0].logprobs, slots)
        return step.tokens[slots].astype(np.int64)

    def _verify(self, advances: Sequence[Advance], logit_rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Run a step that verifies drafts; return the next token after each of its tokens, and some logits.

        No step is launched speculatively after it: the next step depends on the drafts that the host accepts.
        """
        if any(len(advance.tokens) > 1 and not advance.verifies for advance in advances):
            raise InputError("step: a step that verifies drafts takes no prompts; take them in another step")
        drafts = PackedTokens.empty(sum(len(advance.tokens) for advance in advances))
        drafts.pack([], [], 0, advances)
        with self.runner.waiting():
            self.drop_step()
            self.logprobs = {}
            self._reserve(StepPlan.of(advances), self.lengths)
            tokens, logits = self.runner.verify(drafts, logit_rows, advances[0].network)
            return tokens, logits.astype(np.float32)

    def _reserve(self, plan: StepPlan, lengths: np.ndarray) -> None:
        """Reserve pages for a step; lengths: the tokens that each slot holds before it."""
        self.runner.reserve(plan.lengths, lengths)
        self._written |= plan.lengths.keys()

    def _enqueue(self, advances: Sequence[Advance]) -> tuple[StepPlan, EnqueuedStep]:
        """Enqueue a step, or what the step in flight lacks of it."""
        self._set_masks(advances)
        plan = StepPlan.of(advances)
        step = self._in_flight
        self.drop_step()
        if step is None or not self._computes(step, plan):
            self._reserve(plan, self.lengths)
            return plan, self.runner.enqueue(plan)
        if step.plan.chunks or not plan.chunks:
            return plan, step
        # The speculative step had no prompts: they follow in another pass.
        chunks = StepPlan.of(plan.chunks)
        self._reserve(chunks, step.plan.lengths_after(self.lengths))
        chunk_step = self.runner.enqueue(chunks)
        chunk_step.passes[:0] = step.passes  # before it: a row in flight may be of a slot that has a chunk now
        return plan, chunk_step

    def _computes(self, step: EnqueuedStep, plan: StepPlan) -> bool:
        """Return whether the step in flight computes a step: see `StepPlan.computes`."""
        loads = self._adapter_loads()
        if loads is not None and step.adapter_loads is not None:
            slots = list(plan.lengths)
            if (loads[slots] != step.adapter_loads[slots]).any():
                return False
        return step.previous_tokens is not None and step.plan.computes(plan, step.previous_tokens)

    def _enqueue_speculatively(self, following: Sequence[Advance], previous: StepPlan) -> EnqueuedStep | None:
        """Enqueue the step after a planned one; None if that isn't possible."""
        if any(advance.verifies for advance in following):
            return None
        plan = StepPlan.of(following)
        lengths = previous.lengths_after(self.lengths)
        if not plan.can_follow(previous, lengths, self.runner.limits):
            return None
        try:
            self._reserve(plan, lengths)
            step = self.runner.enqueue(plan)
        except (CheckError, InputError):
            return None  # out of memory for a step that may never be needed; if it is, its caller gets the error
        step.adapter_loads = self._adapter_loads()
        return step

    def warm_up(self) -> Iterator[None]:
        """Run all calls once, in parts: see `StepRunner.warm_up`."""
        self.drop_step()
        for _ in self.runner.warm_up(self.lengths, adapters=self._resident is not None):
            yield
            self.drop_step()  # of requests that ran meanwhile
