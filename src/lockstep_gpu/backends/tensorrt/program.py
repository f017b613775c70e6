"""A loaded engine, bound to its weights on the device, and calls of it.

An engine runs in contexts: one that takes any shape, and one for each shape that a CUDA graph is captured with, because
a captured graph holds only while its context keeps its shapes. All contexts of a device work in the same memory: calls
follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.artifacts.adapters import rows_of
from lockstep.artifacts.signature import IO
from lockstep.errors import CheckError
from lockstep.weights import Tensors, check_bound_slots, check_inputs
from lockstep_gpu import cuda
from lockstep_gpu.backends.tensorrt.compat import TENSORRT
from lockstep_gpu.device import Device
from lockstep_gpu.program import Arrays, Bound, GpuExecutable, GpuProgram, Shapes
from lockstep_gpu.weights import DeviceWeights, Uploads


@dataclass(eq=False, slots=True)
class Context:
    """An execution context, its scratch memory, and the last shapes and addresses: setting them is slow."""

    native: Any
    memory: cuda.Array
    shapes: Shapes | None = None
    addresses: dict[str, int] = field(default_factory=dict)

    def resize(self, shapes: Shapes) -> None:
        """Set the shapes of inputs that differ from the last ones."""
        if shapes is self.shapes or shapes == self.shapes:
            return
        self.shapes = None
        for name, shape in shapes.items():
            TENSORRT.set_input_shape(self.native, name, shape)
        self.shapes = shapes

    def point(self, addresses: Mapping[str, int]) -> None:
        """Set the addresses of inputs, weights and outputs that differ from the last ones."""
        last = self.addresses
        for name, address in addresses.items():
            if last.get(name) != address:
                TENSORRT.set_tensor_address(self.native, name, address)
                last[name] = address


def first_profile(
    profiles: Iterable[Mapping[str, Sequence[Sequence[int]]]], shapes: Mapping[str, Sequence[int]], where: Path
) -> int:
    """Return the first profile, {input: (min, opt, max)}, that takes these shapes. Raises CheckError if none does."""
    for number, bounds in enumerate(profiles):
        if all(_is_between(bounds[name][0], shape, bounds[name][2]) for name, shape in shapes.items()):
            return number
    raise CheckError(
        f"{where}: expected shapes within a profile of the engine, found {dict(shapes)}; raise the limits of the "
        "config and build again"
    )


def _is_between(low: Sequence[int], shape: Sequence[int], high: Sequence[int]) -> bool:
    return all(smallest <= size <= largest for smallest, size, largest in zip(low, shape, high))


class TensorRTProgram(GpuProgram):
    """An engine plan on a rank's device, without weights: see `GpuProgram`."""

    by_profiles = True

    def __init__(self, engine_path: Path, slots: Sequence[IO], rank: int = 0):
        super().__init__(engine_path, slots, rank)
        self.device.use()
        cuda.leak_at_exit(self)
        self.engine = TENSORRT.deserialize(engine_path.read_bytes(), str(engine_path))
        self.tensors = {tensor.name: tensor for tensor in TENSORRT.tensors(self.engine)}
        check_inputs(self.slots, self.tensors, str(engine_path))
        self._scratch = _Scratch.of(self.device)
        self._scratch.reserve(TENSORRT.device_memory_size(self.engine))
        self._contexts: dict[tuple, Context] = {}

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> TensorRTExecutable:
        """Return the engine with its weights, whose uploads may go on. Raises CheckError where they do not fit."""
        check_bound_slots(self.slots, slots, str(self.path))
        if not slots:
            return TensorRTExecutable(self, {}, Uploads(), {})
        assert weights is not None  # the caller's part: see Program.bind
        self.device.use()
        store = DeviceWeights.of(weights, self.device)
        arrays: dict[str, cuda.Array] = {}
        rows: dict[str, cuda.Array] = {}
        for slot, names in slots.items():
            shape, dtype = self.slots[slot]
            inputs = rows_of(slot)
            where = f"{self.path}: slot {slot}"
            array = arrays[slot] = store.put(weights, names, shape, dtype, where, room=bool(inputs))
            if inputs:  # the slot's last rows are those of adapters, as many for each input
                first = sum(len(weights[name]) for name in names)
                count = (array.shape[0] - first) // len(inputs)
                starts = range(first, array.shape[0], count)
                rows |= {name: array[at : at + count] for name, at in zip(inputs, starts, strict=True)}
        return TensorRTExecutable(self, arrays, store.uploads, rows)

    def tuned_for(self, shapes: Shapes) -> Shapes:
        """Return the shapes that the profile is tuned for in which a call takes these: see `GpuProgram`."""
        profile = self.profile_for(shapes)
        return {name: self.tensors[name].profiles[profile][1] for name in shapes}

    def profile_for(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the first profile that takes these input shapes. Raises CheckError where none does."""
        profiles = []
        for number in range(self.engine.num_optimization_profiles):
            profiles.append({name: self.tensors[name].profiles[number] for name in shapes})
        return first_profile(profiles, shapes, self.path)

    def context_for(self, shapes: Shapes, exclusive: bool) -> Context:
        """Return a context for these input shapes; exclusive: no other shapes will be set in it."""
        profile = self.profile_for(shapes)
        key: tuple = (profile,)
        if exclusive:
            key = (profile, tuple(sorted(shapes.items())))
        if key not in self._contexts:
            self._contexts[key] = self.new_context(profile)
        return self._contexts[key]

    def new_context(self, profile: int) -> Context:
        native = TENSORRT.create_context(self.engine, str(self.path))
        scratch = self._scratch.memory
        TENSORRT.set_device_memory(native, scratch.address, scratch.nbytes)
        TENSORRT.set_profile(native, profile, self.device.stream.handle)
        return Context(native, scratch)


class _Scratch:
    """The memory that all contexts of a device work in: calls follow each other."""

    _instances: dict[Device, _Scratch] = {}

    def __init__(self) -> None:
        self.memory = cuda.empty((1,), "u1")

    @classmethod
    def of(cls, device: Device) -> _Scratch:
        if device not in cls._instances:
            cls._instances[device] = cls()
        return cls._instances[device]

    def reserve(self, nbytes: int) -> None:
        """Make the memory large enough for later contexts; earlier ones, and their graphs, keep the old memory."""
        if nbytes > self.memory.nbytes:
            self.memory = cuda.empty((nbytes,), "u1", "engines to work in")


class TensorRTExecutable(GpuExecutable):
    """An engine with the addresses of its weights."""

    program: TensorRTProgram

    def __init__(self, program: TensorRTProgram, weights: Arrays, uploads: Uploads, adapter_rows: Arrays):
        super().__init__(uploads, weights, adapter_rows)
        self.program = program

    def bind(self, inputs: Arrays, outputs: Arrays, captured: bool = False) -> Bound:
        program = self.program
        self.check_arrays({**inputs, **outputs})
        arrays = {**self.weights, **inputs, **outputs}
        addresses = {name: array.address for name, array in arrays.items()}
        stream = program.device.stream.handle

        def run(context: Context, shapes: Shapes, buffers: object = arrays) -> None:
            """Run the engine; `buffers` keeps the memory alive: a context has addresses only."""
            context.resize(shapes)
            context.point(addresses)
            TENSORRT.enqueue(context.native, stream)

        return run
