"""The runner of steps: the ranks of a network, driven by one thread, and the passes that it enqueues on them.

Each call is enqueued on all ranks before the next one. What a step computes is decided in `plan.py`; here are device
arrays, graphs, launches and waits.

Rows that only decode are one CUDA graph for each (number of rows, capacity of the cache): embedding, blocks, attention,
cache writes, logits, next tokens. The graph runs rows 0 up to a power of two, whichever slots decode; rows that don't
decode write nothing. A pass with chunks is enqueued call by call: the device computes the first layers while the host
prepares the next ones. It is padded to one of a few sizes, so that most of its calls are CUDA graphs (`Part`), and a
frequent one is a single graph. Rows that decode in such a pass have the attention of a decode step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.errors import CheckError
from lockstep.step.advance import PackedTokens
from lockstep.step.network import Network
from lockstep_gpu import cuda
from lockstep_gpu.attention.make import make_tables
from lockstep_gpu.device import Device
from lockstep_gpu.plan import (
    CAPTURED_TOKENS,
    CAPTURED_TOKENS_OF_RANKS,
    MAX_VERIFY_TOKENS,
    BlockChoice,
    StepLimits,
    StepPlan,
    bucket,
    padded_size,
    row_buckets,
    warm_up_plans,
)
from lockstep_gpu.profiling import in_range
from lockstep_gpu.ranks.all_reduce import Exchange, connect
from lockstep_gpu.ranks.blocks import engine_of
from lockstep_gpu.ranks.rank import FetchedTokens, PassCalls, Rank, max_exchange_bytes
from lockstep_gpu.ranks.watch import RankWatch
from lockstep_gpu.weights import Uploads

CHECK_RANKS = "LOCKSTEP_CHECK_RANKS"  # environment variable: if set, each step's results are compared between ranks
_MAX_CAPTURED_PASSES = 128
# A pass is captured whole when its layout has come this often: capturing costs the host as much as this many replays
# save.
CAPTURED_AFTER = 16


class EnqueuedPass(NamedTuple):
    """The calls of an enqueued pass, by rank, and by slot its row of the logits."""

    calls: Sequence[PassCalls]
    rows: Mapping[int, int]


@dataclass
class EnqueuedStep:
    """An enqueued step.

    Attributes:
        fetched: Of each rank.
        previous_tokens: Of a step in flight: the previous step's tokens by slot.
        adapter_loads: Of a step in flight: the adapter loads that it ran with.
    """

    plan: StepPlan
    passes: list[EnqueuedPass]
    fetched: list[FetchedTokens]
    previous_tokens: np.ndarray | None = None
    adapter_loads: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Return the first rank's tokens, by slot."""
        return self.fetched[0].tokens

    def logits(self, rank: int, slots: Iterable[int]) -> list[cuda.Array]:
        """Return a rank's logits of some slots, [1, vocab_size] each, valid until the next step."""
        by_slot = {}
        for calls, rows in self.passes:
            for slot, row in rows.items():
                by_slot[slot] = calls[rank].logits[row : row + 1]
        return [by_slot[slot] for slot in slots]


class StepRunner:
    """The ranks of a network.

    Attributes:
        last: Each rank's calls of the last enqueued pass.
        captured: The passes that are captured whole, by (layout, choice of blocks, drawn).
    """

    def __init__(
        self, networks: Sequence[Network], num_slots: int, max_seq_len: int, max_num_tokens: int, kv_bytes: float | None
    ):
        """Allocate the ranks' KV caches and buffers: see `GpuExecutor`. Makes the first rank's device current."""
        network = networks[0]
        by_rank = list(zip(*((entry, *entry.others) for entry in networks), strict=True))
        self.uploads = [all_uploads([entry, *entry.others]) for entry in networks]
        devices = [Device.get(rank) for rank in range(len(by_rank))]
        captured_tokens = CAPTURED_TOKENS_OF_RANKS if network.others else CAPTURED_TOKENS
        if engine_of(network.embedding).program.by_profiles:
            captured_tokens = 0  # a context keeps the sizes of one pass, so no graph of another stays valid
        self.limits = limits = StepLimits(num_slots, max_seq_len, max_num_tokens, network.vocab_size, captured_tokens)
        exchanges: list[Exchange] = []
        if network.others:
            exchanges = connect(devices, *max_exchange_bytes(network, limits))
        self.tables = make_tables(network, num_slots, max_seq_len, kv_bytes, _least_free(devices))
        self.ranks = [
            Rank(rank_networks, device, self.tables, limits, exchange)
            for rank_networks, device, exchange in zip(by_rank, devices, exchanges or (None,), strict=True)
        ]
        self.watch = RankWatch(exchanges) if exchanges else None
        self._compares = bool(network.others and os.environ.get(CHECK_RANKS))
        self.last: list[PassCalls] = []
        self.captured = dict[tuple, list[PassCalls]]()
        self._pass_counts = Counter[tuple]()  # how often a pass came, by the keys of `captured`
        self._host_logits: np.ndarray | None = None
        devices[0].use()

    def on_each_device(self) -> Iterator[Rank]:
        """Yield the ranks in order, each with its device current; then make the first one's current again."""
        for rank in self.ranks:
            rank.device.use()
            yield rank
        if len(self.ranks) > 1:
            self.ranks[0].device.use()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Wait for devices in the `with` block; if one of several hangs, the watchdog ends the process."""
        return contextlib.nullcontext() if self.watch is None else self.watch.waiting()

    def wait_for_weights(self) -> None:
        """Wait until all weights are on the devices. Raises the exception of a failed upload."""
        for uploads in itertools.chain.from_iterable(self.uploads):
            uploads.wait()

    def synchronize(self) -> None:
        """Wait for all streams."""
        with self.waiting():
            for rank in self.on_each_device():
                rank.stream.synchronize()

    def drain(self) -> None:
        """Wait for all streams and ignore errors."""
        with self.waiting():
            for rank in self.ranks:
                rank.stream.drain()

    def check(self) -> None:
        """Raise CheckError if a rank timed out at an all-reduce."""
        for rank in self.ranks:
            if rank.exchange is not None:
                rank.exchange.check()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Enqueue calls that wait for other ranks in the `with` block; if one fails, no rank waits any longer."""
        self.check()
        try:
            yield
        except BaseException:  # a KeyboardInterrupt, too, leaves kernels that wait for others
            for rank in self.ranks:
                if rank.exchange is not None:
                    rank.exchange.abort()
            raise

    def reserve(self, lengths_after: Mapping[int, int], lengths: np.ndarray) -> None:
        """Reserve pages for a step; lengths: tokens of all slots before it, lengths_after: of its slots after it."""
        self.wait_for_weights()
        self.tables.reserve(lengths_after)
        for rank in self.on_each_device():
            rank.reserve(lengths_after, lengths)

    @in_range("step")
    def enqueue(self, plan: StepPlan) -> EnqueuedStep:
        """Enqueue a step that pages were reserved for."""
        passes = []
        for planned in plan.passes(self.limits.num_slots, self.ranks[0].tuned_for):
            passes.append(self._enqueue_chunks(planned) if planned.chunks else self._enqueue_decode(planned))
        return EnqueuedStep(plan, passes, self._fetch_tokens())

    def _enqueue_decode(self, plan: StepPlan) -> EnqueuedPass:
        slots = [advance.slot for advance in plan.decoding]
        positions = [advance.start for advance in plan.decoding]
        tokens = None
        if plan.decoding[0].tokens[0] >= 0:  # else all are `PREVIOUS_TOKEN`
            tokens = [advance.tokens[0] for advance in plan.decoding]
        calls = self.decode_pass(
            bucket(max(slots) + 1, self.limits.num_slots), self.choice(plan.network, slots), self.drawn(slots)
        )
        for rank in self.on_each_device():
            rank.state.decode(slots, tokens, positions, rank.stream)
        self.launch(calls)
        return EnqueuedPass(calls, dict(zip(slots, slots)))

    def decode_pass(self, count: int, choice: BlockChoice, drawn: bool) -> list[PassCalls]:
        """Return each rank's calls of a pass in which rows 0 to `count`-1 decode: see `Rank.decode_pass`."""
        return [rank.decode_pass(count, choice, drawn) for rank in self.on_each_device()]

    def choice(self, network: int, slots: Iterable[int]) -> BlockChoice:
        """Return the blocks of a pass of these slots: with adapters if one of them has one."""
        adapter_slots = self.ranks[0].state.adapters
        adapted = adapter_slots is not None and bool((adapter_slots[list(slots)] >= 0).any())
        return BlockChoice(network, adapted)

    def drawn(self, slots: Iterable[int]) -> bool:
        """Return whether sharded logits must be gathered on the device, because a token of `slots` is drawn."""
        return self.ranks[0].splits_logits and self.ranks[0].state.draws(slots)

    def _enqueue_chunks(self, plan: StepPlan) -> EnqueuedPass:
        """Enqueue a pass with chunks, and with rows that decode before them."""
        for rank in self.on_each_device():
            rank.state.send_samplings(rank.stream)
            rank.state.advance(list(plan.lengths), list(plan.lengths.values()))
        return self._enqueue_packed(plan, self.choice(plan.network, plan.lengths), self.drawn(plan.lengths))

    def _enqueue_packed(
        self, plan: StepPlan, choice: BlockChoice, drawn: bool, write: bool = True, capture: bool = False
    ) -> EnqueuedPass:
        """Enqueue a pass with chunks, as one graph if its layout was captured.

        write: see `StepPlan.pack`. capture: capture the next pass of this layout whole, however often it came.
        """
        packed = plan.pack(self.limits, write)
        inputs = [rank.send(packed) for rank in self.on_each_device()]
        layout = self.ranks[0].layout(*inputs[0])
        key = layout, choice, drawn
        calls = self.captured.get(key)
        if calls is not None:
            self.launch(calls)
            return EnqueuedPass(calls, packed.logits)
        with self._together():
            by_rank = [rank.enqueue(*arrays, choice, drawn) for rank, arrays in zip(self.ranks, inputs)]
            *_, last = zip(*by_rank, strict=True)
        self.ranks[0].device.use()
        self.last = calls = list(last)
        if layout is not None:
            self._pass_counts[key] += 1
            is_due = capture or self._pass_counts[key] == CAPTURED_AFTER
            if is_due and len(self.captured) < _MAX_CAPTURED_PASSES:
                self.captured[key] = calls
        return EnqueuedPass(calls, packed.logits)

    @in_range("pass")
    def launch(self, calls: Sequence[PassCalls]) -> None:
        """Enqueue a pass: call by call the first time, as a graph from the second time on.

        A library may allocate memory in its first call, which can't be captured.
        """
        self.last = list(calls)
        if calls[0].graph is None:
            if not calls[0].warm or calls[0].observed:
                self._enqueue_calls(calls)
                return
            self._capture(calls)
        with self._together():
            for rank, rank_calls in zip(self.on_each_device(), calls):
                assert rank_calls.graph is not None
                rank_calls.graph.launch(rank.stream)

    def _enqueue_calls(self, by_rank: Sequence[PassCalls]) -> None:
        # Each call goes to all ranks before the next: a call may make the host wait for its rank, which must not be
        # waiting for a kernel of another rank that isn't enqueued yet.
        with self._together():
            for calls in zip(*(rank_calls.calls for rank_calls in by_rank), strict=True):
                for _, (_, call) in zip(self.on_each_device(), calls):
                    call()
        for rank_calls in by_rank:
            rank_calls.warm = True

    def _capture(self, by_rank: Sequence[PassCalls]) -> None:
        graphs = []
        for rank, rank_calls in zip(self.on_each_device(), by_rank):
            with rank.stream.capture() as graph:
                for _, call in rank_calls.calls:
                    call()
            graphs.append(graph)
        # Set after all are captured: if one rank runs out of memory, no rank must have a graph.
        for rank_calls, graph in zip(by_rank, graphs):
            rank_calls.graph = graph

    def _fetch_tokens(self) -> list[FetchedTokens]:
        """Enqueue the copies of the last step's tokens and log-probabilities to the host."""
        for rank in self.on_each_device():
            rank.fetched.reverse()
            tokens, logprobs, done = rank.fetched[0]
            rank.stream.download(tokens, rank.state.next_tokens)
            if rank is self.ranks[0] and rank.state.returns_logprobs:
                rank.stream.download(logprobs, rank.state.logits_tables.logprobs)
            done.record(rank.stream)
        return [rank.fetched[0] for rank in self.ranks]

    def wait(self, step: EnqueuedStep) -> None:
        """Wait until a step is done. Raises CheckError if a rank is missing, or if its results differ."""
        for fetched in step.fetched:
            fetched.done.wait()
            self.check()
        if self._compares:
            self._compare("tokens", [fetched.tokens for fetched in step.fetched])
            exits = []
            for rank, calls in zip(self.on_each_device(), self.last):
                exits.append([rank.fetch(array) for array in calls.exit_inputs])
            for arrays in zip(*exits):
                self._compare("values after the last layer", arrays)

    def _compare(self, what: str, by_rank: Sequence[np.ndarray]) -> None:
        """Raise CheckError if a rank's values differ from the first rank's in any bit."""
        for number, values in enumerate(by_rank):
            if values.tobytes() != by_rank[0].tobytes():
                raise CheckError(
                    f"tensor_parallel: rank {number} (GPU {self.ranks[number].device.number}): expected the {what} of "
                    "rank 0 to the bit, found others; check that GPU and its links (nvidia-smi, dmesg)"
                )

    def logits(self, step: EnqueuedStep, slots: Sequence[int]) -> np.ndarray:
        """Wait until a step is done; return the logits of some slots, [len(slots), vocab_size].

        The next call overwrites them. Raises as `wait` does.
        """
        with self._together():
            for calls, _ in step.passes:
                for rank, rank_calls in zip(self.on_each_device(), calls):
                    rank.gather(rank_calls)
        logits = self._fetch_logits(self.ranks[0], step.logits(0, slots))
        self.wait(step)
        if self._compares:
            by_rank = []
            for number, rank in enumerate(self.on_each_device()):
                by_rank.append(self._fetch_logits(rank, step.logits(number, slots)).copy())
            self._compare("logits", by_rank)
        return logits

    def _fetch_logits(self, rank: Rank, rows: Sequence[cuda.Array]) -> np.ndarray:
        """Wait for rows of logits and return them, in a buffer that the next call overwrites."""
        if self._host_logits is None and rows:
            max_rows = max(self.limits.num_slots, MAX_VERIFY_TOKENS)
            self._host_logits = cuda.pinned((max_rows, rows[0].shape[1]), rows[0].dtype)
        for index, row in enumerate(rows):
            assert self._host_logits is not None
            rank.stream.download(self._host_logits[index : index + 1], row)
        rank.stream.synchronize()
        if self._host_logits is None:
            return np.empty((0, rank.network.vocab_size), np.float32)
        return self._host_logits[: len(rows)]

    def verify(self, drafts: PackedTokens, logit_rows: Sequence[int], network: int) -> tuple[np.ndarray, np.ndarray]:
        """Run a pass whose rows are tokens of any slots; return the next token after each, and some rows' logits.

        Each row uses its slot's page table, and the keys and values of all rows are written before any are read.
        """
        (rank,) = self.ranks
        slots = drafts.slots.tolist()
        count = len(slots)
        rank.verify_state.copy_slots(rank.state, slots)
        rank.verify_state.decode(range(count), drafts.token_ids.tolist(), drafts.position_ids.tolist(), rank.stream)
        for attention in rank.paged:
            attention.begin_verify(slots)
        rows = min(padded_size(count), MAX_VERIFY_TOKENS)
        calls = rank.decode_pass(rows, self.choice(network, slots), False, verifies=True)
        self.launch([calls])
        rank.stream.download(rank.fetched_verified, rank.verify_state.next_tokens)
        logits = self._fetch_logits(rank, [calls.logits[row : row + 1] for row in logit_rows])
        return rank.fetched_verified[:count].astype(np.int64), logits

    def warm_up(self, lengths: np.ndarray, adapters: bool) -> Iterator[None]:
        """Run all calls once, so that no request waits for a graph capture or a library's first call.

        This captures the decode graph of each number of rows, and runs the passes of `warm_up_plans` and GEMMs of many
        sizes. Yields after each part, between which steps may run. Caches don't change. Further networks run the same
        kernels, and are captured when they are used. lengths: the tokens of all slots. adapters: with adapters, too.
        """
        choices = [BlockChoice()]
        if adapters and self.ranks[0].has_base:
            choices.append(BlockChoice(adapted=True))
        drawn_choices = (False, True) if self.ranks[0].splits_logits else (False,)
        self.reserve({}, lengths)
        for rank in self.on_each_device():
            rank.state.decode([], None, [], rank.stream)
        for count, choice, drawn in itertools.product(row_buckets(self.limits.num_slots), choices, drawn_choices):
            calls = self.decode_pass(count, choice, drawn)
            while calls[0].graph is None:
                self.launch(calls)
        self.synchronize()
        self.check()
        yield
        for choice in choices:
            for plan, capture in warm_up_plans(self.limits):
                self._enqueue_packed(plan, choice, False, write=False)  # runs its parts
                self._enqueue_packed(plan, choice, False, write=False, capture=capture)  # captures each of them
                if capture:
                    self._enqueue_packed(plan, choice, False, write=False)  # captures all of them as one graph
                self.synchronize()
                self.check()
                yield
            for rank in self.ranks:
                for _ in rank.warm_products(choice):
                    self.synchronize()
                    yield


def all_uploads(networks: Sequence[Network]) -> list[Uploads]:
    """Return the weight uploads of all engines, without duplicates."""
    uploads: dict[int, Uploads] = {}
    for network in networks:
        for block in network.blocks:
            for piece in block.pieces:
                piece_uploads = engine_of(piece).uploads
                uploads[id(piece_uploads)] = piece_uploads
    return list(uploads.values())


def _least_free(devices: Sequence[Device]) -> int:
    """Return the least free memory of any device, divided by the number of ranks on it."""
    numbers = [device.number for device in devices]
    free = []
    for device in reversed(devices):  # the first device is current afterwards
        device.use()
        free.append(cuda.memory_free() // numbers.count(device.number))
    return min(free)
