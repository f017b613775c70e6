"""An engine bound to its weights, as a step calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from lockstep.errors import CheckError

Call = Callable[[], None]


class Executable(Protocol):
    """An engine with its weights."""

    def prepare(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Call:
        """Return a call that reads `inputs` and writes `outputs` in place, and keeps the arrays alive.

        Raises CheckError if arrays are not contiguous or not of the engine's dtypes.
        """


class Declared(Protocol):
    """The type of an engine's input or output; dimensions are numbers or names."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> Sequence[int | str]: ...


@runtime_checkable
class DeviceExecutable(Executable, Protocol):
    """An engine on device arrays, which `run_once` calls with host arrays."""

    def run_once(
        self, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray], profile: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the outputs for the graph's `inputs`, in the shapes and dtypes of `like`.

        profile: the engine's profile to run in; None: the one that a step uses.
        """


@runtime_checkable
class HasAdapterRows(Executable, Protocol):
    """An engine with rows in its weights for adapters.

    adapter_rows: by input lora_A of its graph, an array [max_adapters * max_lora_rank, in_features] for A transposed.
    """

    @property
    def adapter_rows(self) -> Mapping[str, Any]: ...


@runtime_checkable
class HostExecutable(Executable, Protocol):
    """An engine on NumPy arrays, which declares its inputs and outputs; where: its file, for errors."""

    @property
    def where(self) -> str: ...

    @property
    def inputs(self) -> Mapping[str, Declared]: ...

    @property
    def outputs(self) -> Mapping[str, Declared]: ...


@functools.cache  # the check of a protocol is slow
def _runs_on_device(kind: type) -> bool:
    return issubclass(kind, DeviceExecutable)


def run_once(
    executable: Executable, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray], profile: int | None = None
) -> dict[str, np.ndarray]:
    """Run any engine on NumPy arrays: see `DeviceExecutable`."""
    if _runs_on_device(type(executable)):
        return cast(DeviceExecutable, executable).run_once(inputs, like, profile)
    engine = cast(HostExecutable, executable)
    arrays = {name: np.ascontiguousarray(array, engine.inputs[name].dtype) for name, array in inputs.items()}
    outputs = {name: np.empty(array.shape, engine.outputs[name].dtype) for name, array in like.items()}
    executable.prepare(arrays, outputs)()
    return {name: array.astype(like[name].dtype, copy=False) for name, array in outputs.items()}


def check_bound(arrays: Mapping[str, np.ndarray], declared: Mapping[str, Declared], where: str) -> None:
    """Raise CheckError if arrays differ from a host engine's names and dtypes, or are not contiguous.

    A library would copy a non-contiguous array silently, and write its output to the copy.
    """
    if set(arrays) != set(declared):
        raise CheckError(f"{where}: expected arrays for {sorted(declared)}, found {sorted(arrays)}")
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise CheckError(f"{where}: expected a contiguous array for {name!r}, found strides {array.strides}")
        if array.dtype != declared[name].dtype:
            raise CheckError(f"{where}: {name!r}: expected {declared[name].dtype.name}, found {array.dtype.name}")
