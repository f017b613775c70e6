"""What the runtime asks of a backend's engines: programs without weights, and calls of them on device arrays.

A call is bound once to arrays of the largest sizes (`GpuExecutable.bind`); each time it is given a context and the
shapes of its inputs. Calls of a captured graph have a context of their own (`prepare`), for the graph holds only while
its context keeps its shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.gpu import cuda
from lockstep.gpu.device import Device
from lockstep.gpu.tensor import Tensor
from lockstep.gpu.weights import Uploads
from lockstep.step.executable import Run

Shapes = Mapping[str, tuple[int, ...]]
Arrays = Mapping[str, cuda.Array]


class Bound(Protocol):
    """A call with fixed arrays; its context, of `context_for`, and shapes of inputs are given each time."""

    def __call__(self, context: Any, shapes: Shapes, /) -> None: ...


class GpuProgram(Protocol):
    """An engine file on a rank's device, without weights.

    tensors: of all inputs and outputs, by name. dynamic: the inputs that have a dynamic dimension. by_profiles: a call
    takes as long as the largest size of a profile, whatever the size.
    """

    by_profiles: bool

    @property
    def path(self) -> Path: ...

    @property
    def device(self) -> Device: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def dynamic(self) -> Collection[str]: ...

    def tuned_for(self, shapes: Shapes) -> Shapes:
        """Return the shapes for which a call takes as long as for these. Raises CheckError where there are none."""

    def context_for(self, shapes: Shapes, own: bool) -> Any:
        """Return a context for these input shapes; own: no other shapes will be set in it."""


class GpuExecutable(Protocol):
    """An engine with its weights.

    Wait for `uploads`, which bring the weights to the device, before the first run. adapter_rows: see
    `lockstep.step.executable.HasAdapterRows`.
    """

    @property
    def uploads(self) -> Uploads: ...

    @property
    def adapter_rows(self) -> Arrays: ...

    @property
    def program(self) -> GpuProgram: ...

    def prepare(self, inputs: Arrays, outputs: Arrays, own: bool = False) -> Run:
        """Return a call on the device's stream; own: it is for a captured graph."""

    def bind(self, inputs: Arrays, outputs: Arrays) -> Bound:
        """Return a call on arrays of the largest sizes. Raises CheckError for arrays that the engine does not take."""


def run_once(
    executable: GpuExecutable, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return an engine's outputs for host arrays, in the shapes and dtypes of `like`: see `DeviceExecutable`."""
    executable.uploads.wait()
    device, tensors = executable.program.device, executable.program.tensors
    device.use()
    stream = device.stream
    host = {name: np.ascontiguousarray(array.astype(tensors[name].dtype)) for name, array in inputs.items()}
    given = {name: cuda.empty(array.shape, array.dtype) for name, array in host.items()}
    made = {name: cuda.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
    found = {name: np.empty(array.shape, tensors[name].dtype) for name, array in like.items()}
    for name in host:
        stream.upload(given[name], host[name])
    call = executable.prepare(given, made)  # held until the stream is through with what it uses
    call()
    for name in made:
        stream.download(found[name], made[name])
    stream.synchronize()
    return {name: array.astype(like[name].dtype) for name, array in found.items()}
