"""A loaded engine, its weights on the device, and calls of it.

Tensors are uploaded once each, whichever layers share them, from the mapped checkpoint through page-locked memory; the
parts of a fused slot lie one after another. An engine runs in contexts: one that takes any shape, and one for each
shape that a CUDA graph is captured with, because a captured graph holds only while its context keeps its shapes. All
contexts of a device work in one piece of its memory: calls follow each other.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.compat import Library
from lockstep.backends.tensorrt.device import describe_gpu, gpu_key
from lockstep.errors import CheckError
from lockstep.step.executable import Run
from lockstep.weights import Tensors

Shapes = Mapping[str, tuple[int, ...]]
ONE_GPU = "LOCKSTEP_RANKS_ON_ONE_GPU"  # of the environment: set, all ranks run on the first GPU, for checks
_PIECE = 32 << 20  # bytes; larger pieces copy no faster
_UPLOADERS = 4


class Device:
    """What all programs of a rank share: its device, a stream there, and the memory that contexts work in."""

    _instances: dict[int, Device] = {}

    def __init__(self, number: int) -> None:
        self.number = number
        self.use()
        self.stream = cuda.Stream()
        self._scratch = cuda.empty((1,), "u1")

    @classmethod
    def get(cls, rank: int = 0) -> Device:
        """The device of a rank: of the rank's number, unless all are to share the first. Raises CheckError where it is
        not there, another kind than the first, or out of reach of another rank's."""
        if rank not in cls._instances:
            number = 0 if os.environ.get(ONE_GPU) else rank
            _check_peers(number)
            cls._instances[rank] = cls(number)
        return cls._instances[rank]

    def use(self) -> None:
        """What the calling thread does from now on is done on this device."""
        cuda.use_device(self.number)

    def reserve(self, nbytes: int) -> None:
        """Make the shared memory large enough for the contexts to come. Those that are there, and graphs captured with
        them, keep what they have."""
        if nbytes > self._scratch.nbytes:
            self._scratch = cuda.empty((nbytes,), "u1", "engines to work in")

    def context(self, library: Library, engine: Any, profile: int, where: str, own: bool) -> tuple[Any, cuda.Array]:
        """A context, and the memory that must live as long as it runs. own: its shapes will not change."""
        context = library.create_context(engine, where, own)
        library.set_device_memory(context, self._scratch.address, self._scratch.nbytes)
        library.set_profile(context, profile, self.stream.handle)
        return context, self._scratch


def _check_peers(number: int) -> None:
    """Let a device and those before it, which are the same kind, reach each other's memory."""
    if number >= (count := cuda.device_count()):
        raise CheckError(
            f"tensor_parallel: expected a GPU for each rank, {number + 1} or more, found {count}; make more visible "
            "(CUDA_VISIBLE_DEVICES), or export with fewer ranks"
        )
    for other in range(number):
        first, own = (gpu_key(describe_gpu(ordinal=ordinal)) for ordinal in (other, number))
        if own != first:
            raise CheckError(
                f"tensor_parallel: GPU {number}: expected {_text(first)}, as GPU {other}, found {_text(own)}; choose "
                "GPUs of one kind (CUDA_VISIBLE_DEVICES)"
            )
        for one, two in ((number, other), (other, number)):
            if not cuda.can_access(one, two):
                raise CheckError(
                    f"tensor_parallel: GPU {one}: expected access to the memory of GPU {two}, found none; choose GPUs "
                    "that have it (`nvidia-smi topo -p2p r`; CUDA_VISIBLE_DEVICES)"
                )
            cuda.use_device(one)
            cuda.enable_access(two)


def _text(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in key.items())


@dataclass(eq=False, slots=True)
class Context:
    """An execution context. memory: what it works in. shapes, addresses: what it was told last, which layers that
    follow each other share for the most part: telling it again costs as much as a kernel."""

    native: Any
    memory: cuda.Array
    shapes: Shapes | None = None
    addresses: dict[str, int] = field(default_factory=dict)

    def resize(self, library: Library, shapes: Shapes) -> None:
        """Tell the shapes of inputs."""
        if shapes is self.shapes or shapes == self.shapes:
            return
        self.shapes = None
        for name, shape in shapes.items():
            library.set_input_shape(self.native, name, shape)
        self.shapes = shapes

    def point(self, library: Library, addresses: Mapping[str, int]) -> None:
        """Tell the addresses of inputs, weights and outputs."""
        known = self.addresses
        for name, address in addresses.items():
            if known.get(name) != address:
                library.set_tensor_address(self.native, name, address)
                known[name] = address


class Bound(Protocol):
    """A call of an engine whose arrays lie where they lie, in a context and of sizes that are told each time."""

    def __call__(self, context: Context, shapes: Shapes) -> None: ...


class TensorRTProgram:
    """An engine file on a rank's device, without weights."""

    def __init__(self, library: Library, engine_path: Path, slots: Sequence[IO], rank: int = 0):
        self.library, self.path = library, engine_path
        self.slots = {slot.name: (slot.sizes, slot.numpy_dtype) for slot in slots}
        self.device = Device.get(rank)
        self.device.use()
        self.engine = library.deserialize(engine_path.read_bytes(), str(engine_path))
        self.tensors = {tensor.name: tensor for tensor in library.tensors(self.engine)}
        missing = set(self.slots) - set(self.tensors)
        if missing:
            raise CheckError(
                f"{engine_path}: expected weight inputs {sorted(self.slots)}, found none for "
                f"{sorted(missing)}; build the engines again"
            )
        self.device.reserve(library.device_memory_size(self.engine))
        self._contexts: dict[tuple, Context] = {}

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> TensorRTExecutable:
        """Raises CheckError for a slot without tensors, tensors without a slot, or another dtype or size than the
        slot's."""
        if set(slots) != set(self.slots):
            raise CheckError(
                f"{self.path}: expected weights for the slots {sorted(self.slots)}, found "
                f"{sorted(slots)}; export and build again"
            )
        if not slots:
            return TensorRTExecutable(self, {}, Uploads())
        assert weights is not None  # the caller's part: see Program.bind
        self.device.use()
        store = DeviceWeights.of(weights, self.device)
        arrays = {
            slot: store.put(weights, names, *self.slots[slot], f"{self.path}: slot {slot}")
            for slot, names in slots.items()
        }
        return TensorRTExecutable(self, arrays, store.uploads)

    def profile_for(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """The first profile that takes these input shapes. Raises CheckError where none does."""
        for profile in range(self.library.num_profiles(self.engine)):
            bounds = {name: self.tensors[name].profiles[profile] for name in shapes}
            if all(
                low <= size <= high
                for name, shape in shapes.items()
                for low, size, high in zip(bounds[name][0], shape, bounds[name][2])
            ):
                return profile
        raise CheckError(
            f"{self.path}: expected shapes within a profile of the engine, found "
            f"{dict(shapes)}; raise the limits of the config and build again"
        )

    def context_for(self, shapes: Shapes, own: bool) -> Context:
        """A context for these input shapes. `own`: no other shapes will be set in it."""
        profile = self.profile_for(shapes)
        key = (profile, tuple(sorted(shapes.items()))) if own else (profile,)
        if key not in self._contexts:
            self._contexts[key] = Context(*self.device.context(self.library, self.engine, profile, str(self.path), own))
        return self._contexts[key]


class TensorRTExecutable:
    """An engine with the addresses of its weights. Wait for `uploads`, which bring them there, before the first run."""

    def __init__(self, program: TensorRTProgram, weights: Mapping[str, cuda.Array], uploads: Uploads):
        self.program = program
        self.uploads = uploads
        self._weights = weights

    def prepare(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array], own: bool = False) -> Run:
        """A call that reads `inputs` and writes `outputs` on the device's stream. `own`: for a captured graph."""
        bound, shapes = self.bind(inputs, outputs), {name: array.shape for name, array in inputs.items()}
        return functools.partial(bound, self.program.context_for(shapes, own), shapes)

    def bind(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array]) -> Bound:
        """As `prepare`, of arrays of the largest sizes: the call is told the context and the shapes of inputs, of
        `context_for`. Raises CheckError for arrays that the engine does not take."""
        program, library, tensors = self.program, self.program.library, self.program.tensors
        declared = {name for name in tensors if name not in self._weights}
        if declared != {*inputs, *outputs}:
            raise CheckError(
                f"{program.path}: expected arrays for {sorted(declared)}, found {sorted({*inputs, *outputs})}"
            )
        for name, array in {**inputs, **outputs}.items():
            if array.dtype != tensors[name].dtype:
                raise CheckError(
                    f"{program.path}: {name!r}: expected {tensors[name].dtype.name}, found {array.dtype.name}"
                )
        addresses = {name: array.address for name, array in {**self._weights, **inputs, **outputs}.items()}
        stream = program.device.stream.handle

        def run(
            context: Context,
            shapes: Shapes,
            held: object = (*inputs.values(), *outputs.values(), *self._weights.values()),
        ) -> None:
            """`held` keeps the memory alive: a context holds addresses."""
            context.resize(library, shapes)
            context.point(library, addresses)
            library.enqueue(context.native, stream)

        return run

    def run_once(self, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs for `inputs`, in the shapes and dtypes of `like`: see `DeviceExecutable`."""
        self.uploads.wait()
        self.program.device.use()
        stream, tensors = self.program.device.stream, self.program.tensors
        host = {name: np.ascontiguousarray(array.astype(tensors[name].dtype)) for name, array in inputs.items()}
        given = {name: cuda.empty(array.shape, array.dtype) for name, array in host.items()}
        made = {name: cuda.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
        found = {name: np.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
        for name in host:
            stream.upload(given[name], host[name])
        self.prepare(given, made)()
        for name in made:
            stream.download(found[name], made[name])
        stream.synchronize()
        return {name: array.astype(like[name].dtype) for name, array in found.items()}


class Uploads:
    """Copies to the device that go on in the background."""

    def __init__(self) -> None:
        self._pending: list[Future] = []

    def add(self, copies: Sequence[Future]) -> None:
        self._pending += copies

    def wait(self) -> None:
        """Until all are through. Raises what one of them raised, each time: without it there is nothing to go on
        with."""
        while self._pending:
            self._pending[-1].result()
            self._pending.pop()


class DeviceWeights:
    """Tensors of one checkpoint on a device. Wait for `uploads` before the first use."""

    _stores: weakref.WeakKeyDictionary[object, dict[Device, DeviceWeights]] = weakref.WeakKeyDictionary()

    def __init__(self, device: Device):
        self.uploads = Uploads()
        self._arrays: weakref.WeakValueDictionary[tuple[Hashable, ...], cuda.Array] = weakref.WeakValueDictionary()
        self._uploader = _Uploader(device)

    @classmethod
    def of(cls, weights: Tensors, device: Device) -> DeviceWeights:
        stores = cls._stores.setdefault(weights.checkpoint, {})
        if device not in stores:
            stores[device] = cls(device)
        return stores[device]

    def put(
        self, weights: Tensors, names: Sequence[str], shape: tuple[int, ...], dtype: np.dtype, where: str
    ) -> cuda.Array:
        """The tensors `names`, one after another, as one array of `shape`; uploaded if they are not there yet."""
        key = tuple(map(weights.identity, names))
        array = self._arrays.get(key)
        if array is not None:
            return array.reshape(*shape)
        parts = [weights[name] for name in names]
        if sum(part.size for part in parts) != math.prod(shape) or any(part.dtype != dtype for part in parts):
            found = ", ".join(f"{part.dtype.name} {list(part.shape)}" for part in parts)
            raise CheckError(
                f"{where}: expected weights {dtype.name} {list(shape)}, found {found}; are "
                f"graphs and weights of one model and precision?"
            )
        array = self._arrays[key] = cuda.empty(shape, dtype, "weights")
        flat, start = array.reshape(math.prod(shape)), 0
        for part in parts:
            self.uploads.add(self._uploader.upload(flat[start : start + part.size], part))
            start += part.size
        return array


class _Uploader:
    """Threads that copy from mapped files into page-locked memory and on to the device: while one reads, another
    sends."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_UPLOADERS, os.cpu_count() or 1))
        self._own = threading.local()

    def upload(self, array: cuda.Array, part: np.ndarray) -> list[Future]:
        """array: 1-D, of as many numbers as `part`. Each piece holds the memory that it is copied to."""
        copies, start = [], 0
        for values in _pieces(part):
            copies.append(self._pool.submit(self._copy, array[start : start + values.size], values))
            start += values.size
        return copies

    def _copy(self, array: cuda.Array, values: np.ndarray) -> None:
        own = self._own
        if not hasattr(own, "stream"):
            self._device.use()
            own.stream, own.host = cuda.Stream(), cuda.pinned((_PIECE,), np.uint8)
        host = own.host[: values.nbytes].view(values.dtype)
        np.copyto(host.reshape(values.shape), values)
        own.stream.upload(array, host)
        own.stream.synchronize()


def _pieces(part: np.ndarray) -> Iterator[np.ndarray]:
    """Views of all numbers in order, each of at most `_PIECE` bytes; a rank's part of a matrix may have gaps."""
    if part.flags.c_contiguous:
        values, numbers = part.reshape(-1), _PIECE // part.itemsize
        yield from (values[at : at + numbers] for at in range(0, values.size, numbers))
    elif len(part) == 1 or part[0].nbytes > _PIECE:
        for row in part:
            yield from _pieces(row)
    else:
        rows = _PIECE // part[0].nbytes
        yield from (part[at : at + rows] for at in range(0, len(part), rows))
