"""All-reduce and all-gather over the ranks of a model, by one kernel per rank.

Small all-reduces can be fused into the kernel that reads the sum (sums.cuh,
`GpuExecutable.prepare_fused_all_reduce`). The ranks run in one process, on devices with peer access.

The kernels of all ranks wait for each other, so a call must be enqueued on every rank before the host waits for any
device: the executor enqueues call by call, and each call on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.errors import CheckError
from lockstep.step.advance import next_power_of_two
from lockstep_gpu import cuda
from lockstep_gpu.device import Device
from lockstep_gpu.kernels.library import KINDS, including

_BLOCKS = 128  # MOST_BLOCKS in sums.cuh
_UNIT = 16  # bytes
_PEER_ARRAYS = "inbox", "flags", "values", "terms"  # in the order of sums.cuh
_ABORTED = 0xFFFFFFFF
# Seconds that a rank waits for another one: less than the server's --stall, so that the error names the rank.
TIMEOUT_S = 30
# Bytes up to which every rank sums the whole array (one-shot). Above, each of more than two ranks reduces its shard and
# sends it to all (two-shot): fewer bytes, one more wait. On four H200, 1 MB takes 11.7 us in one shot and 14.2 in two,
# 2 MB 21.2 and 19.8.
ONE_SHOT_NBYTES = 1 << 20


class Exchange:
    """A rank's end of the all-reduces and all-gathers, on its device's stream. All ranks must make the same calls."""

    def __init__(self, device: Device, rank: int, world: int, slot: int, room: int):
        """Allocate a rank's memory.

        slot, room: units of 16 bytes that the rank has in each inbox, and in each `terms` array.
        """
        self.device = device
        self.rank = rank
        self.world = world
        self._slot = slot
        device.use()
        self.options = f"-DWORLD={world}", f"-DROOM={room}"  # for compiling any source that includes `sums.cuh`
        module = cuda.compile_kernels(including("all_reduce.cu"), self.options)
        self._reduce = module["all_reduce"]
        self._gather = module["all_gather"]
        what = "sums over ranks"
        self.inbox = cuda.empty((2 * world * slot * _UNIT,), "u1", what)
        self.flags = cuda.zeros((2 * world * _BLOCKS,), "u4")
        self.values = cuda.zeros((world * _BLOCKS,), "u8")
        self.terms = cuda.filled(0xFF, (3 * world * room * _UNIT,), "u1", what)  # EMPTY
        self._sums: dict[tuple, cuda.Launch] = {}
        self._state = cuda.zeros((4,), "u4")
        self._peers = cuda.empty((4 * world,), "u8")
        self.host_lost = cuda.pinned((1,), "u4")
        self.host_lost[0] = 0
        # Page-locked memory has the same address on the host and on all devices.
        self._lost = cuda.Array(self.host_lost.ctypes.data, (1,), "u4", self.host_lost)

    def exchange_addresses(self, exchanges: Sequence[Exchange]) -> None:
        """Upload the addresses of all ranks' memory to the device; exchanges: all ranks', in order."""
        self.device.use()
        addresses: list[int] = []
        for name in _PEER_ARRAYS:
            addresses += [getattr(exchange, name).address for exchange in exchanges]
        self.device.stream.upload(self._peers, np.array(addresses, np.uint64))
        self.device.stream.synchronize()
        self._device_numbers = [exchange.device.number for exchange in exchanges]

    def sum(self, values: cuda.Array) -> None:
        """All-reduce values in place, accumulated in float32 in the order of the ranks.

        values: float32, float16 or bfloat16; its memory must extend to a multiple of 16 bytes.
        """
        units = -(-values.nbytes // _UNIT)
        shots = shots_for(units, self.world)
        if self.is_small(values):
            blocks = -(-units // 128)
            threads = 128
        elif shots == 1:
            # Leave room on the device for another rank's blocks (LOCKSTEP_RANKS_ON_ONE_GPU).
            blocks = min(512, 4 * cuda.multiprocessors(self.device.number))
            threads = 256
        else:
            blocks, threads = _grid(-(-units // self.world))
        key = values.address, values.dtype, shots, threads
        launch = self._sums.get(key)
        if launch is None:
            arguments = values, *self.group, KINDS[values.dtype.name], shots, units
            # Large all-reduces were slower if the next kernel occupies the device while they wait.
            overlaps = self.is_small(values)
            launch = cuda.Launch(self._reduce, self.device.stream, threads, *arguments, overlaps=overlaps)
            self._sums[key] = launch
        launch(blocks, units)

    def is_small(self, values: cuda.Array) -> bool:
        """Return whether an all-reduce may be fused into the kernel that reads it."""
        return values.nbytes <= ONE_SHOT_NBYTES

    def gather(self, shard: cuda.Array, gathered: cuda.Array) -> None:
        """All-gather shards [rows, columns] into [rows, world * columns]; the shard's memory is padded to 16 bytes."""
        rows, columns = shard.shape
        size = shard.dtype.itemsize
        if columns * size % _UNIT == 0:
            columns = columns * size // _UNIT
            size = _UNIT
        units = -(-shard.nbytes // _UNIT)
        self._gather.launch(self.device.stream, *_grid(units), shard, gathered, *self.group, units, rows, columns, size)

    @property
    def group(self) -> tuple[cuda.Array | int, ...]:
        """Return the kernel arguments of sums.cuh's Group."""
        return self._peers, self._state, self._lost, self.rank, self._slot, TIMEOUT_S

    def abort(self) -> None:
        """Stop all waits: a step failed on one rank after others were enqueued."""
        self.host_lost[0] = self.host_lost[0] or _ABORTED

    def check(self) -> None:
        """Raise CheckError if a wait for another rank timed out: the results since then are garbage."""
        lost = int(self.host_lost[0])
        if lost == _ABORTED:
            raise CheckError("tensor_parallel: expected whole steps, found one that ended half way; start again")
        if lost:
            raise CheckError(
                f"tensor_parallel: expected rank {lost - 1} (GPU {self._device_numbers[lost - 1]}) at a sum, found "
                f"that rank {self.rank} waited {TIMEOUT_S} s for it; see what that GPU does (nvidia-smi), and start "
                "again"
            )


def connect(devices: Sequence[Device], sum_nbytes: int, gather_nbytes: int) -> list[Exchange]:
    """Return the ranks' exchanges; sum_nbytes, gather_nbytes: the largest arrays of a sum and of a gather."""
    world = len(devices)
    units = -(-sum_nbytes // _UNIT)
    room = units
    part = 0
    if shots_for(units, world) == 2:
        room = min(units, ONE_SHOT_NBYTES // _UNIT)
        part = -(-units // world)
    slot = max(part, -(-gather_nbytes // _UNIT))
    exchanges = [Exchange(device, rank, world, slot, room) for rank, device in enumerate(devices)]
    for exchange in exchanges:
        exchange.exchange_addresses(exchanges)
    return exchanges


def shots_for(units: int, world: int) -> int:
    """Return 1 or 2, the shots of an all-reduce of `units` units of 16 bytes: see all_reduce.cu."""
    if world == 2 or units * _UNIT <= ONE_SHOT_NBYTES:
        return 1
    return 2


def _grid(units: int) -> tuple[int, int]:
    """Return (blocks, threads) of kernels that wait by flags, as measured fastest on two and four H200."""
    if units <= 1024:
        return 4, 128
    return min(_BLOCKS, max(8, next_power_of_two(units // 1024))), 512
