"""The ranks of a network, driven by one thread: each call is put on all streams before the next one is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.attention.make import make_tables
from lockstep.gpu.device import Device
from lockstep.gpu.ranks.all_reduce import connect
from lockstep.gpu.ranks.rank import Rank, StepCalls, engine_of, most_exchanged
from lockstep.gpu.ranks.watch import RankWatch
from lockstep.step.network import Network

CHECK_RANKS = "LOCKSTEP_CHECK_RANKS"  # of the environment: set, each step's results are compared between ranks


class RankGroup:
    """The ranks of a network; compares: results between ranks. last: calls put on the streams last, by rank."""

    def __init__(self, network: Network, num_slots: int, max_seq_len: int, max_num_tokens: int, kv_bytes: float | None):
        """Allocate the ranks' KV cache and buffers: see `GpuExecutor`. The first rank's device is used then."""
        networks = (network, *network.others)
        uploads = [
            engine_of(piece).uploads
            for each in networks
            for block in (each.embedding, *(block for block, _ in each.layers), each.exit)
            for piece in block.pieces
        ]
        self._uploads = list({id(each): each for each in uploads}.values())
        devices = [Device.get(rank) for rank in range(len(networks))]
        most = most_exchanged(network, num_slots, max_num_tokens)
        exchanges = connect(devices, *most) if network.others else [None]
        self.tables = make_tables(network, num_slots, max_seq_len, kv_bytes, _least_free(devices))
        self.ranks = [
            Rank(each, device, self.tables, num_slots, max_seq_len, max_num_tokens, exchange)
            for each, device, exchange in zip(networks, devices, exchanges, strict=True)
        ]
        self.watch = RankWatch([rank.exchange for rank in self.ranks if rank.exchange]) if network.others else None
        self.compares = bool(network.others and os.environ.get(CHECK_RANKS))
        self.last: list[StepCalls] = []
        devices[0].use()

    def each(self) -> Iterator[Rank]:
        """Yield the ranks in order, each on its device; then use the first one's again."""
        for rank in self.ranks:
            rank.device.use()
            yield rank
        if len(self.ranks) > 1:
            self.ranks[0].device.use()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Wait for devices inside; where one of several hangs, the process ends."""
        return contextlib.nullcontext() if self.watch is None else self.watch.waiting()

    def wait_for_weights(self) -> None:
        """Wait until all weights are on the devices. Raises what an upload raised."""
        for uploads in self._uploads:
            uploads.wait()

    def synchronize(self) -> None:
        """Wait until all streams are through."""
        with self.waiting():
            for rank in self.each():
                rank.stream.synchronize()

    def drain(self) -> None:
        """Wait until nothing is under way, and ignore errors."""
        with self.waiting():
            for rank in self.ranks:
                rank.stream.drain()

    def check(self) -> None:
        """Raise CheckError where a rank has not come to a sum over all of them."""
        for rank in self.ranks:
            if rank.exchange is not None:
                rank.exchange.check()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Put calls that wait for other ranks on the streams; one that fails lets no rank wait any more."""
        self.check()
        try:
            yield
        except BaseException:
            for rank in self.ranks:
                if rank.exchange is not None:
                    rank.exchange.give_up()
            raise

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> None:
        """Make room for slots that come to hold `ends` tokens; all hold `lengths` before."""
        self.tables.reserve(ends)
        for rank in self.each():
            rank.reserve(ends, lengths)

    def launch(self, steps: Sequence[StepCalls]) -> None:
        """Run a step's calls: the first time one by one, then as a graph.

        A library may allocate in its first call, which a capture does not take: the second time the calls are captured,
        and from then on the graph is launched.
        """
        self.last = list(steps)
        if steps[0].graph is None:
            if not steps[0].warm:
                # Call by call, for what one rank waits for must be on its way before the host waits for that rank.
                with self.together():
                    for calls in zip(*(step.calls for step in steps), strict=True):
                        for _, (_, call) in zip(self.each(), calls):
                            call()
                for step in steps:
                    step.warm = True
                return
            graphs = []
            for rank, step in zip(self.each(), steps):
                with rank.stream.capture() as graph:
                    for _, call in step.calls:
                        call()
                graphs.append(graph)
            for step, graph in zip(steps, graphs):  # all ranks have theirs, or none: one may find no memory for it
                step.graph = graph
        with self.together():
            for rank, step in zip(self.each(), steps):
                assert step.graph is not None
                step.graph.launch(rank.stream)

    def run_pass(self, passes: Sequence[Iterator[StepCalls]]) -> list[StepCalls]:
        """Put a pass on the streams, a little of each rank's in turn, as `launch` does; return each rank's calls."""
        with self.together():
            (*_, steps) = zip(*passes, strict=True)
        self.ranks[0].device.use()
        self.last = list(steps)
        return self.last

    def compare(self, what: str, rank: Rank, found: np.ndarray, first: np.ndarray) -> None:
        """Raise CheckError where a rank found other bytes than the first one."""
        if found.tobytes() != first.tobytes():
            number = self.ranks.index(rank)
            raise CheckError(
                f"tensor_parallel: rank {number} (GPU {rank.device.number}): expected the {what} of rank 0 to the bit, "
                "found others; check that GPU and its links (nvidia-smi, dmesg)"
            )

    def compare_values(self) -> None:
        """Compare what the exit of the last step on the streams reads."""
        found = [_values(rank, step) for rank, step in zip(self.each(), self.last)]
        for rank, values in zip(self.ranks, found):
            for value, first in zip(values, found[0]):
                self.compare("values behind the last layer", rank, value, first)


def _values(rank: Rank, step: StepCalls) -> list[np.ndarray]:
    hosts = [np.empty(array.shape, array.dtype) for array in step.whole]
    for host, array in zip(hosts, step.whole):
        rank.stream.download(host, array)
    rank.stream.synchronize()
    return hosts


def _least_free(devices: Sequence[Device]) -> int:
    """Return the free bytes of the device with the fewest, a part of it for each of several ranks on it."""
    numbers = [device.number for device in devices]
    free = []
    for device in reversed(devices):  # the first one's is used afterwards
        device.use()
        free.append(cuda.memory_free() // numbers.count(device.number))
    return min(free)
