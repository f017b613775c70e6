"""The ranks of a network, driven by one thread: each call is enqueued on all ranks before the next one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.errors import CheckError
from lockstep.step.network import Network
from lockstep_gpu import cuda
from lockstep_gpu.attention.make import make_tables
from lockstep_gpu.device import Device
from lockstep_gpu.ranks.all_reduce import Exchange, connect
from lockstep_gpu.ranks.rank import Rank, StepCalls, engine_of, max_exchange_bytes
from lockstep_gpu.ranks.watch import RankWatch
from lockstep_gpu.weights import Uploads

CHECK_RANKS = "LOCKSTEP_CHECK_RANKS"  # environment variable: if set, each step's results are compared between ranks


class RankGroup:
    """The ranks of a network.

    Attributes:
        compares: Compare results between ranks.
        last: Each rank's calls of the last enqueued pass.
    """

    def __init__(self, network: Network, num_slots: int, max_seq_len: int, max_num_tokens: int, kv_bytes: float | None):
        """Allocate the ranks' KV caches and buffers: see `GpuExecutor`. Makes the first rank's device current."""
        networks = (network, *network.others)
        self._uploads = _all_uploads(networks)
        devices = [Device.get(rank) for rank in range(len(networks))]
        exchanges: list[Exchange] = []
        if network.others:
            exchanges = connect(devices, *max_exchange_bytes(network, num_slots, max_num_tokens))
        self.tables = make_tables(network, num_slots, max_seq_len, kv_bytes, _least_free(devices))
        self.ranks = [
            Rank(rank_network, device, self.tables, num_slots, max_seq_len, max_num_tokens, exchange)
            for rank_network, device, exchange in zip(networks, devices, exchanges or (None,), strict=True)
        ]
        self.watch = RankWatch(exchanges) if exchanges else None
        self.compares = bool(network.others and os.environ.get(CHECK_RANKS))
        self.last: list[StepCalls] = []
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
        for uploads in self._uploads:
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
    def together(self) -> Iterator[None]:
        """Enqueue calls that wait for other ranks in the `with` block; if one fails, no rank waits any longer."""
        self.check()
        try:
            yield
        except BaseException:
            for rank in self.ranks:
                if rank.exchange is not None:
                    rank.exchange.give_up()
            raise

    def reserve(self, lengths_after: Mapping[int, int], lengths: np.ndarray) -> None:
        """Reserve pages for a step; lengths: tokens of all slots before it, lengths_after: of its slots after it."""
        self.tables.reserve(lengths_after)
        for rank in self.on_each_device():
            rank.reserve(lengths_after, lengths)

    def launch(self, steps: Sequence[StepCalls]) -> None:
        """Run a step's calls: one by one the first time, as a graph from the second time on.

        A library may allocate memory in its first call, which can't be captured.
        """
        self.last = list(steps)
        if steps[0].graph is None:
            if not steps[0].warm or steps[0].observed:
                self._run_calls(steps)
                return
            self._capture(steps)
        with self.together():
            for rank, step in zip(self.on_each_device(), steps):
                assert step.graph is not None
                step.graph.launch(rank.stream)

    def _run_calls(self, steps: Sequence[StepCalls]) -> None:
        # Each call goes to all ranks before the next: a call may make the host wait for its rank, which must not be
        # waiting for a kernel of another rank that isn't enqueued yet.
        with self.together():
            for calls in zip(*(step.calls for step in steps), strict=True):
                for _, (_, call) in zip(self.on_each_device(), calls):
                    call()
        for step in steps:
            step.warm = True

    def _capture(self, steps: Sequence[StepCalls]) -> None:
        graphs = []
        for rank, step in zip(self.on_each_device(), steps):
            with rank.stream.capture() as graph:
                for _, call in step.calls:
                    call()
            graphs.append(graph)
        # Set after all are captured: if one rank runs out of memory, no rank must have a graph.
        for step, graph in zip(steps, graphs):
            step.graph = graph

    def run_pass(self, passes: Sequence[Iterator[StepCalls]]) -> list[StepCalls]:
        """Enqueue a prefill pass, alternating between the ranks as `launch` does; return each rank's calls."""
        with self.together():
            *_, steps = zip(*passes, strict=True)
        self.ranks[0].device.use()
        self.last = list(steps)
        return self.last

    def compare(self, what: str, rank: Rank, values: np.ndarray, expected: np.ndarray) -> None:
        """Raise CheckError if a rank's values differ from the first rank's (`expected`) in any bit."""
        if values.tobytes() != expected.tobytes():
            number = self.ranks.index(rank)
            raise CheckError(
                f"tensor_parallel: rank {number} (GPU {rank.device.number}): expected the {what} of rank 0 to the bit, "
                "found others; check that GPU and its links (nvidia-smi, dmesg)"
            )

    def compare_values(self) -> None:
        """Compare the inputs of the lm_head block in the last enqueued step."""
        by_rank = [_exit_inputs(rank, step) for rank, step in zip(self.on_each_device(), self.last)]
        for rank, arrays in zip(self.ranks, by_rank):
            for array, expected in zip(arrays, by_rank[0]):
                self.compare("values after the last layer", rank, array, expected)


def _all_uploads(networks: Sequence[Network]) -> list[Uploads]:
    """Return the weight uploads of all engines, without duplicates."""
    uploads: dict[int, Uploads] = {}
    for network in networks:
        for block in network.blocks:
            for piece in block.pieces:
                piece_uploads = engine_of(piece).uploads
                uploads[id(piece_uploads)] = piece_uploads
    return list(uploads.values())


def _exit_inputs(rank: Rank, step: StepCalls) -> list[np.ndarray]:
    hosts = [np.empty(array.shape, array.dtype) for array in step.exit_inputs]
    for host, array in zip(hosts, step.exit_inputs):
        rank.stream.download(host, array)
    rank.stream.synchronize()
    return hosts


def _least_free(devices: Sequence[Device]) -> int:
    """Return the least free memory of any device, divided by the number of ranks on it."""
    numbers = [device.number for device in devices]
    free = []
    for device in reversed(devices):  # the first device is current afterwards
        device.use()
        free.append(cuda.memory_free() // numbers.count(device.number))
    return min(free)
