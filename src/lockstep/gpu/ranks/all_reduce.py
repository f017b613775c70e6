"""All-reduce and all-gather over the ranks of a model, by one kernel on each.

Sums of few rows are made by the kernels that read them too (sums.cu, `GpuExecutable.prepare_summing`). The ranks run in
one process, on devices that reach each other's memory.

The kernels of all ranks wait for each other. So each rank's host calls must be on its stream before the host waits for
any: the executor makes them rank by rank, call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.device import Device
from lockstep.gpu.kernels.row_kernels import COMMON
from lockstep.gpu.kernels.step_kernels import NUMBERS

SUMS, _KERNELS = (Path(__file__).with_name(f"{n}.cu").read_text(encoding="utf-8") for n in ("sums", "all_reduce"))
_BLOCKS = 128  # sums.cu, MOST_BLOCKS
_UNIT = 16  # bytes
_AT_PEERS = "inbox", "flags", "values", "terms"  # in sums.cu's order
_GIVEN_UP = 0xFFFFFFFF
# That a rank waits for another one: less than the server waits for a sign of life (serve's --stall), so that the rank
# is named first.
_SECONDS = 30
# Bytes above which each of more than two ranks accumulates its part and sends that to all, instead of all of all: fewer
# bytes, one more wait. On four H200 1 MB takes 11.7 us in one shot and 14.2 in two, 2 MB 21.2 and 19.8.
_ONE_SHOT = 1 << 20


class Exchange:
    """A rank's end of the exchange, on its device's stream; all ranks must be asked for the same."""

    def __init__(self, device: Device, rank: int, world: int, slot: int, room: int):
        """Allocate a rank's memory, in units (of 16 bytes); slot, room: its part of an inbox, and of terms."""
        self.device = device
        self.rank = rank
        self.world = world
        self._slot = slot
        device.use()
        self.options = f"-DWORLD={world}", f"-DROOM={room}"  # of all that `sums.cu` stands before
        module = cuda.compile_kernels(COMMON + SUMS + _KERNELS, self.options)
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
        self._host_lost = cuda.pinned((1,), "u4")
        self._host_lost[0] = 0
        # Page-locked memory has one address on the host and on all devices.
        self._lost = cuda.Array(self._host_lost.ctypes.data, (1,), "u4", self._host_lost)

    def meet(self, others: Sequence[Exchange]) -> None:
        """Send the addresses of all ranks' memory to the device; others: their exchanges, in order."""
        self.device.use()
        places = [[getattr(each, of).address for each in others] for of in _AT_PEERS]
        self.device.stream.upload(self._peers, np.array(places, np.uint64).reshape(-1))
        self.device.stream.synchronize()
        self._numbers = [each.device.number for each in others]

    def sum(self, values: cuda.Array) -> None:
        """Replace values by their sum over the ranks.

        They are float32, float16 or bfloat16, and their memory goes on to a multiple of 16 bytes. The sum is
        accumulated in the ranks' order in float32.
        """
        units = -(-values.nbytes // _UNIT)
        shots = shots_for(units, self.world)
        if self.is_small(values):
            blocks = -(-units // 128)
            threads = 128
        else:
            # No more than leave room on the device for another rank's (LOCKSTEP_RANKS_ON_ONE_GPU).
            one_shot = min(512, 4 * cuda.multiprocessors(self.device.number)), 256
            blocks, threads = one_shot if shots == 1 else _grid(-(-units // self.world))
        key = values.address, values.dtype, shots, threads
        launch = self._sums.get(key)
        if launch is None:
            # Large sums were slower where the next kernel is on the device while they wait.
            given = values, *self.group, NUMBERS[values.dtype.name], shots, units
            launch = self._sums[key] = cuda.Launch(
                self._reduce, self.device.stream, threads, *given, overlaps=self.is_small(values)
            )
        launch(blocks, units)

    def is_small(self, values: cuda.Array) -> bool:
        """Return whether the kernel that reads a sum may make it."""
        return values.nbytes <= _ONE_SHOT

    def gather(self, part: cuda.Array, whole: cuda.Array) -> None:
        """Put parts [rows, columns] side by side into [rows, world * columns]; the part is padded to 16 bytes."""
        (rows, columns), size = part.shape, part.dtype.itemsize
        if columns * size % _UNIT == 0:
            columns = columns * size // _UNIT
            size = _UNIT
        units = -(-part.nbytes // _UNIT)
        self._gather.launch(self.device.stream, *_grid(units), part, whole, *self.group, units, rows, columns, size)

    @property
    def group(self) -> tuple[cuda.Array | int, ...]:
        """Return what kernels take of sums.cu's Group."""
        return self._peers, self._state, self._lost, self.rank, self._slot, _SECONDS

    def give_up(self) -> None:
        """Let no rank wait any more: a step ended half way."""
        self._host_lost[0] = self._host_lost[0] or _GIVEN_UP

    def check(self) -> None:
        """Raise CheckError where a rank did not come: what was computed since is worth nothing."""
        lost = int(self._host_lost[0])
        if lost == _GIVEN_UP:
            raise CheckError("tensor_parallel: expected whole steps, found one that ended half way; start again")
        if lost:
            raise CheckError(
                f"tensor_parallel: expected rank {lost - 1} (GPU {self._numbers[lost - 1]}) at a sum, found that rank "
                f"{self.rank} waited {_SECONDS} s for it; see what that GPU does (nvidia-smi), and start again"
            )


def connect(devices: Sequence[Device], most_sum: int, most_gather: int) -> list[Exchange]:
    """Return the ranks' exchanges; most_sum, most_gather: bytes that one call has at most."""
    world = len(devices)
    units = -(-most_sum // _UNIT)
    room = units
    part = 0
    if shots_for(units, world) == 2:
        room = min(units, _ONE_SHOT // _UNIT)
        part = -(-units // world)
    slot = max(part, -(-most_gather // _UNIT))
    found = [Exchange(device, rank, world, slot, room) for rank, device in enumerate(devices)]
    for exchange in found:
        exchange.meet(found)
    return found


def shots_for(units: int, world: int) -> int:
    """Return 1 or 2, see all_reduce.cu, for so many units of 16 bytes."""
    return 1 if world == 2 or units * _UNIT <= _ONE_SHOT else 2


def _grid(units: int) -> tuple[int, int]:
    """Return (blocks, threads), as was fastest with flags on two and four H200."""
    if units <= 1024:
        return 4, 128
    return min(_BLOCKS, max(8, 1 << (units // 1024 - 1).bit_length())), 512
