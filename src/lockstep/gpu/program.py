"""What the runtime asks of a backend's engines: programs without weights, and calls of them on device arrays.

A call is bound once to arrays of the largest sizes (`GpuExecutable.bind`); each time it is given a context and the
shapes of its inputs. Calls of a captured graph have a context of their own (`prepare`), for the graph holds only while
its context keeps its shapes.
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
from lockstep.gpu import cuda
from lockstep.gpu.device import Device
from lockstep.gpu.tensor import Tensor
from lockstep.gpu.weights import Uploads
from lockstep.step.executable import Run

if TYPE_CHECKING:
    from lockstep.gpu.ranks.all_reduce import Exchange

Shapes = Mapping[str, tuple[int, ...]]
Arrays = Mapping[str, cuda.Array]


class Bound(Protocol):
    """A call with fixed arrays; its context, of `context_for`, and shapes of inputs are given each time."""

    def __call__(self, context: Any, shapes: Shapes, /) -> None: ...


class GpuProgram:
    """An engine file on a rank's device, without weights.

    tensors: of all inputs and outputs, by name. dynamic: the inputs that have a dynamic dimension. by_profiles: a call
    takes as long as the largest size of a profile, whatever the size. slots: shape and dtype of each weight, by name.
    """

    by_profiles: bool
    tensors: Mapping[str, Tensor]

    def __init__(self, path: Path, slots: Sequence[IO], rank: int):
        self.path = path
        self.device = Device.get(rank)
        self.slots = {slot.name: (slot.sizes, slot.numpy_dtype) for slot in slots}

    @functools.cached_property
    def dynamic(self) -> Collection[str]:
        return {name for name, tensor in self.tensors.items() if tensor.is_input and -1 in tensor.shape}

    def tuned_for(self, shapes: Shapes) -> Shapes:
        """Return the shapes for which a call takes as long as for these. Raises CheckError where there are none."""
        raise NotImplementedError  # each backend has its own

    def context_for(self, shapes: Shapes, own: bool) -> Any:
        """Return a context for these input shapes; own: no other shapes will be set in it."""
        raise NotImplementedError  # each backend has its own

    def new_context(self, profile: int, own: bool) -> Any:
        """Return a context of an optimization profile, where there are some."""
        raise NotImplementedError  # each backend with profiles has its own


class GpuExecutable:
    """An engine with its weights.

    Wait for `uploads`, which bring the weights to the device, before the first run. adapter_rows: see
    `lockstep.step.executable.HasAdapterRows`.
    """

    program: GpuProgram

    def __init__(self, uploads: Uploads, weights: Arrays, adapter_rows: Arrays):
        self.uploads = uploads
        self.weights = weights
        self.adapter_rows = adapter_rows

    def prepare(self, inputs: Arrays, outputs: Arrays, own: bool = False) -> Run:
        """Return a call on the device's stream; own: it is for a captured graph."""
        shapes = {name: array.shape for name, array in inputs.items() if name in self.program.dynamic}
        return functools.partial(self.bind(inputs, outputs, own), self.program.context_for(shapes, own), shapes)

    def prepare_summing(
        self, exchange: Exchange, values: cuda.Array, inputs: Arrays, outputs: Arrays
    ) -> tuple[Run, Run] | None:
        """Return a call of the first kernel, which sums `values` over the ranks in their place, and one of the rest.

        They are for a captured graph. None where the first kernel does not sum this input.
        """
        return None

    def bind(self, inputs: Arrays, outputs: Arrays, own: bool = False) -> Bound:
        """Return a call on arrays of the largest sizes. Raises CheckError for arrays that the engine does not take."""
        raise NotImplementedError  # each backend has its own

    def check_arrays(self, given: Arrays) -> None:
        """Raise CheckError for arrays of other names and dtypes than those of the engine, its weights left out."""
        program = self.program
        declared = {name: tensor.dtype for name, tensor in program.tensors.items() if name not in self.weights}
        if set(declared) != set(given):
            raise CheckError(f"{program.path}: expected arrays for {sorted(declared)}, found {sorted(given)}")
        for name, array in given.items():
            if array.dtype != declared[name]:
                raise CheckError(f"{program.path}: {name!r}: expected {declared[name].name}, found {array.dtype.name}")

    def run_once(
        self, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray], profile: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the outputs for host arrays, in the shapes and dtypes of `like`: see `DeviceExecutable`."""
        from lockstep.onnx_tools.adapted_graphs import mask_of  # which a runtime has no need of

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
        host = {name: np.ascontiguousarray(array.astype(tensors[name].dtype)) for name, array in inputs.items()}
        given = {name: cuda.empty(array.shape, array.dtype) for name, array in host.items()}
        made = {name: cuda.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
        found = {name: np.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
        for name in host:
            stream.upload(given[name], host[name])
        shapes = {name: array.shape for name, array in given.items() if name in program.dynamic}
        if profile is not None and program.by_profiles:
            context = program.new_context(profile, True)
        else:
            context = program.context_for(shapes, False)
        call = self.bind(given, made)
        try:
            call(context, shapes)
        except CheckError as error:
            raise CheckError(f"{program.path}: {error}") from None
        for name in made:
            stream.download(found[name], made[name])
        stream.synchronize()  # `call` and `context` live until here
        return {name: array.astype(like[name].dtype) for name, array in found.items()}
