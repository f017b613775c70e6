"""A loaded engine, bound to its weights on the device, and calls of it.

An engine runs in contexts: one that takes any shape, and one for each shape that a CUDA graph is captured with, because
a captured graph holds only while its context keeps its shapes. All contexts of a device work in the same memory: calls
follow each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.adapters import rows_of
from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt.compat import Library
from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.device import Device
from lockstep.gpu.program import Bound, Shapes, run_once
from lockstep.gpu.weights import DeviceWeights, Uploads
from lockstep.onnx_tools.dequantized import sign_of
from lockstep.step.executable import Run
from lockstep.weights import Tensors


@dataclass(eq=False, slots=True)
class Context:
    """An execution context.

    memory: its scratch memory. shapes, addresses: those that were set last. Layers that follow each other share most of
    them, and to set them again costs as much as a kernel.
    """

    native: Any
    memory: cuda.Array
    shapes: Shapes | None = None
    addresses: dict[str, int] = field(default_factory=dict)

    def resize(self, library: Library, shapes: Shapes) -> None:
        """Set the shapes of inputs that differ from the last ones."""
        if shapes is self.shapes or shapes == self.shapes:
            return
        self.shapes = None
        for name, shape in shapes.items():
            library.set_input_shape(self.native, name, shape)
        self.shapes = shapes

    def point(self, library: Library, addresses: Mapping[str, int]) -> None:
        """Set the addresses of inputs, weights and outputs that differ from the last ones."""
        known = self.addresses
        for name, address in addresses.items():
            if known.get(name) != address:
                library.set_tensor_address(self.native, name, address)
                known[name] = address


def first_profile(
    profiles: Iterable[Mapping[str, Sequence[Sequence[int]]]], shapes: Mapping[str, Sequence[int]], where: Path
) -> int:
    """Return the first profile, {input: (min, opt, max)}, that takes these shapes. Raises CheckError if none does."""
    for number, bounds in enumerate(profiles):
        if all(
            low <= size <= high
            for name, shape in shapes.items()
            for low, size, high in zip(bounds[name][0], shape, bounds[name][2])
        ):
            return number
    raise CheckError(
        f"{where}: expected shapes within a profile of the engine, found {dict(shapes)}; raise the limits of the "
        "config and build again"
    )


class TensorRTProgram:
    """An engine plan on a rank's device, without weights: see `GpuProgram`."""

    by_profiles = True

    def __init__(self, library: Library, engine_path: Path, slots: Sequence[IO], rank: int = 0):
        self.library, self.path = library, engine_path
        self.slots = {slot.name: (slot.sizes, slot.numpy_dtype) for slot in slots}
        self.device = Device.get(rank)
        self.device.use()
        cuda.leave_at_exit(self)
        self.engine = library.deserialize(engine_path.read_bytes(), str(engine_path))
        self.tensors = {tensor.name: tensor for tensor in library.tensors(self.engine)}
        self.dynamic = {name for name, tensor in self.tensors.items() if tensor.is_input and -1 in tensor.shape}
        missing = set(self.slots) - set(self.tensors)
        if missing:
            raise CheckError(
                f"{engine_path}: expected weight inputs {sorted(self.slots)}, found none for "
                f"{sorted(missing)}; build the engines again"
            )
        self._scratch = _Scratch.of(self.device)
        self._scratch.reserve(library.device_memory_size(self.engine))
        self._contexts: dict[tuple, Context] = {}

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> TensorRTExecutable:
        """Return the engine with its weights, whose uploads may go on. Raises CheckError where they do not fit."""
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
            slot: store.put(
                weights,
                names,
                *self.slots[slot],
                f"{self.path}: slot {slot}",
                self._sign(slot),
                room=bool(rows_of(slot)),
            )
            for slot, names in slots.items()
        }
        rows: dict[str, cuda.Array] = {}
        for slot, array in arrays.items():
            if inputs := rows_of(slot):
                first = sum(len(weights[name]) for name in slots[slot])
                count = (array.shape[0] - first) // len(inputs)
                places = range(first, array.shape[0], count)
                rows |= {name: array[at : at + count] for name, at in zip(inputs, places, strict=True)}
        return TensorRTExecutable(self, arrays, store.uploads, rows)

    def _sign(self, slot: str) -> int:
        return sign_of(self.tensors[slot].dtype.name, self.slots[slot][1].name)

    def tuned_for(self, shapes: Shapes) -> Shapes:
        """Return the shapes that the profile is tuned for in which a call takes these: see `GpuProgram`."""
        profile = self.profile_for(shapes)
        return {name: self.tensors[name].profiles[profile][1] for name in shapes}

    def profile_for(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the first profile that takes these input shapes. Raises CheckError where none does."""
        count = self.library.num_profiles(self.engine)
        bounds = ({name: self.tensors[name].profiles[profile] for name in shapes} for profile in range(count))
        return first_profile(bounds, shapes, self.path)

    def context_for(self, shapes: Shapes, own: bool) -> Context:
        """Return a context for these input shapes; own: no other shapes will be set in it."""
        profile = self.profile_for(shapes)
        key = (profile, tuple(sorted(shapes.items()))) if own else (profile,)
        if key not in self._contexts:
            self._contexts[key] = self.new_context(profile, own)
        return self._contexts[key]

    def new_context(self, profile: int, own: bool) -> Context:
        """Return a new context of a profile. own: its shapes will not change."""
        native, scratch = self.library.create_context(self.engine, str(self.path), own), self._scratch.memory
        self.library.set_device_memory(native, scratch.address, scratch.nbytes)
        self.library.set_profile(native, profile, self.device.stream.handle)
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
        """Make the memory large enough for later contexts; earlier ones, and their graphs, keep what they have."""
        if nbytes > self.memory.nbytes:
            self.memory = cuda.empty((nbytes,), "u1", "engines to work in")


class TensorRTExecutable:
    """An engine with the addresses of its weights.

    Wait for `uploads`, which bring the weights there, before the first run. adapter_rows: see `HasAdapterRows`.
    """

    def __init__(
        self,
        program: TensorRTProgram,
        weights: Mapping[str, cuda.Array],
        uploads: Uploads,
        adapter_rows: Mapping[str, cuda.Array] | None = None,
    ):
        self.program = program
        self.uploads = uploads
        self.adapter_rows = adapter_rows or {}
        self.weights = weights

    def prepare(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array], own: bool = False) -> Run:
        """Return a call on the device's stream; own: it is for a captured graph."""
        bound, dynamic = self.bind(inputs, outputs), self.program.dynamic
        shapes = {name: array.shape for name, array in inputs.items() if name in dynamic}
        return functools.partial(bound, self.program.context_for(shapes, own), shapes)

    def bind(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array]) -> Bound:
        """Return a call on arrays of the largest sizes.

        The call is given the context and the shapes of inputs, of `context_for`. Raises CheckError for arrays that the
        engine does not take.
        """
        program, library, tensors = self.program, self.program.library, self.program.tensors
        declared = {name for name in tensors if name not in self.weights}
        if declared != {*inputs, *outputs}:
            raise CheckError(
                f"{program.path}: expected arrays for {sorted(declared)}, found {sorted({*inputs, *outputs})}"
            )
        for name, array in {**inputs, **outputs}.items():
            if array.dtype != tensors[name].dtype:
                raise CheckError(
                    f"{program.path}: {name!r}: expected {tensors[name].dtype.name}, found {array.dtype.name}"
                )
        addresses = {name: array.address for name, array in {**self.weights, **inputs, **outputs}.items()}
        stream = program.device.stream.handle

        def run(
            context: Context,
            shapes: Shapes,
            held: object = (*inputs.values(), *outputs.values(), *self.weights.values()),
        ) -> None:
            """Run the engine; `held` keeps the memory alive: a context holds addresses."""
            context.resize(library, shapes)
            context.point(library, addresses)
            library.enqueue(context.native, stream)

        return run

    def run_once(self, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs for `inputs`, in the shapes and dtypes of `like`: see `DeviceExecutable`."""
        return run_once(self, inputs, like)
