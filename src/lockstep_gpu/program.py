"""The interface of a backend's engines: programs without weights, and calls on device arrays.

A call is bound once to arrays of the largest sizes (`GpuExecutable.bind`) and takes a context and input shapes each
time. A call in a captured graph has an exclusive context (`prepare`): the graph is valid only while the shapes set in
its context stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lockstep.artifacts.adapters import IDS, mask_rank
from lockstep.artifacts.signature import IO
from lockstep.errors import CheckError
from lockstep.step.executable import Call
from lockstep_gpu import cuda
from lockstep_gpu.device import Device
from lockstep_gpu.tensor import Tensor
from lockstep_gpu.weights import Uploads

if TYPE_CHECKING:
    from lockstep_gpu.ranks.all_reduce import Exchange

Shapes = Mapping[str, tuple[int, ...]]
Arrays = Mapping[str, cuda.Array]


class Bound(Protocol):
    """A call with fixed arrays. Each call takes a context (see `context_for`) and the inputs' shapes."""

    def __call__(self, context: Any, shapes: Shapes, /) -> None: ...


class GpuProgram:
    """An engine file on a rank's device, without weights.

    Attributes:
        by_profiles: The engine has optimization profiles: a call takes as long as at its profile's largest size.
        tensors: {name: input or output}.
        slots: {name: (shape, dtype)} of each weight input.
    """

    by_profiles: bool
    tensors: Mapping[str, Tensor]

    def __init__(self, path: Path, slots: Sequence[IO], rank: int):
        self.path = path
        self.device = Device.get(rank)
        self.slots = {slot.name: (slot.sizes, slot.numpy_dtype) for slot in slots}

    @functools.cached_property
    def dynamic(self) -> Collection[str]:
        """Return the inputs that have a dynamic dimension."""
        return {name for name, tensor in self.tensors.items() if tensor.is_input and -1 in tensor.shape}

    def tuned_for(self, shapes: Shapes) -> Shapes:
        """Return the shapes whose cost these shapes have: the tuned ones of their profile, if the engine has profiles.

        Raises CheckError if no profile takes the shapes.
        """
        raise NotImplementedError

    def context_for(self, shapes: Shapes, exclusive: bool) -> Any:
        """Return a context for these input shapes; exclusive: no other shapes will be set in it."""
        raise NotImplementedError

    def new_context(self, profile: int) -> Any:
        """Return a new context of an optimization profile, if the engine has profiles."""
        raise NotImplementedError


class GpuExecutable:
    """An engine with its weights.

    Wait for `uploads`, the copies of the weights to the device, before the first run. adapter_rows: see
    `lockstep.step.executable.HasAdapterRows`.
    """

    program: GpuProgram

    def __init__(self, uploads: Uploads, weights: Arrays, adapter_rows: Arrays):
        self.uploads = uploads
        self.weights = weights
        self.adapter_rows = adapter_rows

    def prepare(self, inputs: Arrays, outputs: Arrays, captured: bool = False) -> Call:
        """Return a call on the device's stream; captured: it will be captured in a graph."""
        shapes = {name: array.shape for name, array in inputs.items() if name in self.program.dynamic}
        call = self.bind(inputs, outputs, captured)
        return functools.partial(call, self.program.context_for(shapes, exclusive=captured), shapes)

    def prepare_fused_all_reduce(
        self, exchange: Exchange, values: cuda.Array, inputs: Arrays, outputs: Arrays
    ) -> tuple[Call, Call] | None:
        """Return two calls for a captured graph: the first kernel with an all-reduce of `values` in it, and the rest.

        Returns None if the first kernel can't all-reduce this input.
        """
        return None

    def bind(self, inputs: Arrays, outputs: Arrays, captured: bool = False) -> Bound:
        """Return a call on arrays of the largest sizes. Raises CheckError for wrong names or dtypes."""
        raise NotImplementedError

    def check_arrays(self, arrays: Arrays) -> None:
        """Raise CheckError if names or dtypes differ from the engine's inputs and outputs, except its weights."""
        program = self.program
        declared = {name: tensor.dtype for name, tensor in program.tensors.items() if name not in self.weights}
        if set(declared) != set(arrays):
            raise CheckError(f"{program.path}: expected arrays for {sorted(declared)}, found {sorted(arrays)}")
        for name, array in arrays.items():
            if array.dtype != declared[name]:
                raise CheckError(f"{program.path}: {name!r}: expected {declared[name].name}, found {array.dtype.name}")

    def run_once(
        self, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray], profile: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the outputs for host arrays, in the shapes and dtypes of `like`: see `DeviceExecutable`."""
        from lockstep.onnx_tools.prepare import mask_of  # a runtime doesn't install onnx

        self.uploads.wait()
        program = self.program
        inputs = dict(inputs)
        device = program.device
        tensors = program.tensors
        stream = program.device.stream
        device.use()
        for name, rows in self.adapter_rows.items():
            stream.upload(rows, np.ascontiguousarray(inputs.pop(name).T, rows.dtype))
        for name, tensor in tensors.items():
            if rank := mask_rank(name):
                inputs[name] = mask_of(inputs.pop(IDS), tensor.shape[1], rank, tensor.dtype)
        host_inputs = {name: np.ascontiguousarray(array.astype(tensors[name].dtype)) for name, array in inputs.items()}
        device_inputs = {name: cuda.empty(array.shape, array.dtype) for name, array in host_inputs.items()}
        device_outputs = {name: cuda.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
        host_outputs = {name: np.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
        for name, array in host_inputs.items():
            stream.upload(device_inputs[name], array)
        shapes = {name: array.shape for name, array in device_inputs.items() if name in program.dynamic}
        if profile is not None and program.by_profiles:
            context = program.new_context(profile)
        else:
            context = program.context_for(shapes, exclusive=False)
        call = self.bind(device_inputs, device_outputs)
        try:
            call(context, shapes)
        except CheckError as error:
            raise CheckError(f"{program.path}: {error}") from None
        for name, array in host_outputs.items():
            stream.download(array, device_outputs[name])
        stream.synchronize()  # keep `call` and `context` alive until the stream is done
        return {name: array.astype(like[name].dtype) for name, array in host_outputs.items()}
