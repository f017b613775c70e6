"""The fake device: its memory, its streams, captured graphs and events, as CUDA's runtime calls them."""

from __future__ import annotations

import bisect
import ctypes
import enum
import math
import threading
import time
from collections.abc import Callable

import numpy as np

ERRORS = enum.IntEnum(
    "cudaError_t",
    {
        "cudaSuccess": 0,
        "cudaErrorMemoryAllocation": 2,
        "cudaErrorInvalidDevice": 101,
        "cudaErrorPeerAccessAlreadyEnabled": 704,
    },
)
COPIES = enum.IntEnum(
    "cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2, "cudaMemcpyDeviceToDevice": 3}
)
POISON = 0xFF  # NaN in all floating types, -1 in integers


class Fault(Exception):
    """What a GPU would not survive, or would not say."""


class Waits(Exception):
    """Work that goes on once another stream has done something."""


class Gpu:
    """The memory and streams of `devices` devices, which share their addresses.

    total: bytes of memory; faults: errors where nothing could be raised; names: of devices that are no "fake";
    unreachable: pairs of devices without access to each other; room: bytes that a device has yet, of those that have
    less than the others.
    """

    def __init__(self) -> None:
        self.devices = 1
        self._current = threading.local()
        self.names: dict[int, bytes] = {}
        self.unreachable: list[set[int]] = []
        self.room: dict[int, int] = {}
        self.sums: set[tuple[int, int]] = set()  # (rank, launch) of sums that are made, and not yet sent
        self._enabled: set[tuple[int, int]] = set()
        self._homes: dict[int, int] = {0: 0}  # devices of streams
        self.total = 1 << 34
        self.used = 0
        self.faults = []
        self.launches = 0  # of graphs
        self.plain = 0  # of kernels and engines outside of graphs
        self.cublas_version = "12.8.4"
        self.product_rows = set[int]()  # of products by cuBLAS
        self.profiles = []  # that contexts were set to, in order
        self.lock = threading.RLock()
        self._next = 1 << 44
        self._starts = []
        self._blocks = {}
        self._host: dict[int, tuple[np.ndarray, ctypes.Array]] = {}
        self._queues: dict[int, list[Callable[[], None]]] = {0: []}
        self._blocking: list[int] = []
        self._captures: dict[int, list[Callable[[], None]]] = {}
        self._capturer: int | None = None  # the thread that captures
        self._events: dict[int, list] = {}

    # --- devices

    @property
    def device(self) -> int:
        """The current one, of this thread."""
        return getattr(self._current, "number", 0)

    def set_device(self, number: int):
        if not 0 <= number < self.devices:
            return (ERRORS.cudaErrorInvalidDevice,)
        self._current.number = number
        return (ERRORS.cudaSuccess,)

    def can_access(self, number: int, other: int):
        return ERRORS.cudaSuccess, int({number, other} not in self.unreachable)

    def enable_access(self, other: int, flags: int):
        pair = (self.device, other)
        if pair in self._enabled:
            return (ERRORS.cudaErrorPeerAccessAlreadyEnabled,)
        self._enabled.add(pair)
        return (ERRORS.cudaSuccess,)

    # --- memory

    @property
    def blocks(self) -> int:
        """Allocations on the device that live."""
        return sum(block is not None for block in self._blocks.values())

    @property
    def unused(self) -> int:
        """Bytes of the current device that nobody has."""
        return min(self.total - self.used, self.room.get(self.device, self.total))

    def malloc(self, nbytes: int):
        with self.lock:
            if nbytes > self.unused:
                return ERRORS.cudaErrorMemoryAllocation, 0
            if self.device in self.room:
                self.room[self.device] -= nbytes
            address = self._next
            self._next = self._next + nbytes // 4096 * 4096 + 8192
            self._starts.append(address)
            self._blocks[address] = np.full(nbytes, POISON, np.uint8)
            self.used += nbytes
            return ERRORS.cudaSuccess, address

    def free(self, address: int):
        with self.lock:
            if address:
                if self._capturer == threading.get_ident():
                    self.faults.append("freed: device memory, by the thread that captures")
                if self._blocks.get(address) is None:
                    self.faults.append(f"freed: {address:#x}, which is none that lives")
                else:
                    self.used -= self._blocks[address].size
                    self._blocks[address] = None
            return (ERRORS.cudaSuccess,)

    def bytes(self, address: int, nbytes: int) -> np.ndarray:
        """Device memory, [nbytes] uint8, in place."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0:
            raise Fault(f"{address:#x} is no device memory")
        start = self._starts[number]
        block = self._blocks[start]
        if block is None:
            raise Fault(f"{address:#x} is used after it was freed")
        if address - start + nbytes > block.size:
            raise Fault(
                f"{nbytes} bytes at {address:#x}: {address - start + nbytes - block.size} more than the {block.size} "
                "of its block"
            )
        return block[address - start : address - start + nbytes]

    def array(self, address: int, shape, dtype) -> np.ndarray:
        """Device memory as numbers, in place."""
        dtype = np.dtype(dtype)
        return self.bytes(address, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def malloc_host(self, nbytes: int):
        with self.lock:
            block = ctypes.create_string_buffer(nbytes)
            self._host[ctypes.addressof(block)] = np.frombuffer(block, np.uint8), block
            return ERRORS.cudaSuccess, ctypes.addressof(block)

    def register_host(self, address: int, nbytes: int, flags: int):
        with self.lock:
            block = (ctypes.c_char * nbytes).from_address(address)
            self._host[address] = np.frombuffer(block, np.uint8), block
            return (ERRORS.cudaSuccess,)

    def free_host(self, address: int):
        with self.lock:
            self._host.pop(address)
            return (ERRORS.cudaSuccess,)

    def host(self, address: int, nbytes: int) -> np.ndarray:
        number = bisect.bisect_right(self._starts, address) - 1
        if number >= 0 and address < self._starts[number] + (1 << 20):
            raise Fault(f"{address:#x} is no host memory")
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        with self.lock:  # weights are uploaded by another thread
            return any(
                start <= address and address + nbytes <= start + block.size for start, (block, _) in self._host.items()
            )

    # --- streams

    def put(self, stream: int, work: Callable[[], None]) -> None:
        with self.lock:
            (self._captures[stream] if stream in self._captures else self._queues[stream]).append(work)

    def launch(self, stream: int, home: int, work: Callable[[], None]) -> None:
        """As `put`, of a kernel or engine that was loaded on the device `home`."""
        if not home == self._homes[stream] == self.device:
            raise Fault(f"loaded on device {home}, launched on {self.device}, into a stream of {self._homes[stream]}")
        self.put(stream, work)

    def capturing(self, stream: int) -> bool:
        return stream in self._captures

    def create_stream(self, flags: int):
        if flags != 1:
            raise Fault("only non-blocking streams are imitated")
        with self.lock:
            handle = 100 + len(self._queues)
            self._queues[handle] = []
            self._homes[handle] = self.device
            return ERRORS.cudaSuccess, handle

    def create_blocking_stream(self):
        """A stream that the default stream waits for, and that waits for it."""
        error, handle = self.create_stream(1)
        self._blocking.append(handle)
        return error, handle

    def synchronize(self, stream: int):
        if stream in self._captures:
            raise Fault("a stream that captures cannot be waited for")
        return self._work(stream, lambda: False)

    def _work(self, stream: int, done: Callable[[], bool]):
        with self.lock:
            queue = self._queues[stream]
            waits = 0
            while queue and not done():
                other_queues = (other for other in self._queues.values() if other and other is not queue)
                waits = 0 if self._one(queue) or any(self._one(other) for other in other_queues) else waits + 1
                if waits > 4:  # a kernel meets the others at most twice
                    raise Fault(f"stream {stream} waits for what no other stream is going to do")
        return (ERRORS.cudaSuccess,)

    def _one(self, queue: list[Callable[[], None]]) -> bool:
        """Run the first operation of a stream; return False if it waits."""
        work = queue.pop(0)
        try:
            work()
        except Waits:
            queue.insert(0, work)
            return False
        return True

    def memset(self, address: int, value: int, nbytes: int):
        def run() -> None:
            self.bytes(address, nbytes)[:] = value

        self.put(0, run)  # asynchronous to the host, and to all non-blocking streams
        return (ERRORS.cudaSuccess,)

    def memset_rows(self, address: int, pitch: int, value: int, width: int, rows: int, stream: int):
        def run() -> None:
            for row in range(rows):
                self.bytes(address + row * pitch, width)[:] = value

        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    def copy(self, to: int, source: int, nbytes: int, kind: COPIES, stream: int):
        if kind == COPIES.cudaMemcpyHostToDevice:
            data = self.host(source, nbytes)
            if not self.is_pinned(source, nbytes):
                if self.capturing(stream):
                    raise Fault("a graph copies from host memory that may move")
                data = data.copy()

            def run() -> None:
                self.bytes(to, nbytes)[:] = data
        elif kind == COPIES.cudaMemcpyDeviceToHost:

            def run() -> None:
                self.host(to, nbytes)[:] = self.bytes(source, nbytes)
        else:
            raise Fault(f"{kind} is not imitated")
        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    def copy_now(self, to: int, source: int, nbytes: int, kind: COPIES):
        """A copy in the default stream, which the host waits for."""
        for stream in self._blocking:
            self.synchronize(stream)
        self.copy(to, source, nbytes, kind, 0)
        return self.synchronize(0)

    def copy_rows(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, rows: int, kind: COPIES, stream: int
    ):
        if kind != COPIES.cudaMemcpyDeviceToDevice or width > min(to_pitch, pitch):
            raise Fault(f"rows of {width} bytes, {pitch} and {to_pitch} apart, {kind}")

        def run() -> None:
            for row in range(rows):
                self.bytes(to + row * to_pitch, width)[:] = self.bytes(source + row * pitch, width)

        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    # --- graphs, events

    def begin_capture(self, stream: int, mode: int):
        self._captures[stream] = []
        self._capturer = threading.get_ident()
        return (ERRORS.cudaSuccess,)

    def end_capture(self, stream: int):
        self._capturer = None
        return ERRORS.cudaSuccess, self._captures.pop(stream)

    def launch_graph(self, graph: list, stream: int):
        self.launches += 1
        if self._homes[stream] != self.device:
            raise Fault(f"a graph launched on device {self.device}, into a stream of {self._homes[stream]}")
        for work in graph:
            self.put(stream, work)
        return (ERRORS.cudaSuccess,)

    def create_event(self):
        event: list = [0, 0.0, None]  # not recorded yet: nothing to wait for
        self._events[id(event)] = event
        return ERRORS.cudaSuccess, event

    def record(self, event: list, stream: int):
        event[:] = mark = [stream, None, object()]

        def run() -> None:
            if event[2] is mark[2]:  # else it was recorded again meanwhile
                event[1] = time.perf_counter()

        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    def wait(self, event: list):
        """Later operations of its stream remain."""
        return self._work(event[0], lambda: event[1] is not None)
