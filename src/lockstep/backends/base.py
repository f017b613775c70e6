"""What a backend is: describe the device, build a graph to an engine file, load it, bind weights, run. Nothing outside
its folder knows a library's name; which modules the folder has, `lockstep.config.backends` says.

A call of an engine goes through four steps, so that each costs what it must and no more:

    Backend.load(engine file)      -> Program      once an engine file; no weights yet
    Program.bind(weights)          -> Executable   once a layer; weights stay where they are unless the library repacks
    them Executable.prepare(in, out)    -> run()        once a set of buffers; allocates nothing afterwards
    run()                                          once a step

Buffers are the backend's own arrays (`Backend.empty`): NumPy arrays on a CPU, device arrays elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import onnx

from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.signature import IO
from lockstep.errors import InputError
from lockstep.step.advance import Executor
from lockstep.step.executable import Executable
from lockstep.step.network import Network
from lockstep.weights import Tensors

Array = TypeVar("Array")

# Its BACKEND is the class. A module is imported when its backend is asked for, so that none needs another's library.
_MODULE = "lockstep.backends.*.backend"


@dataclass(frozen=True)
class Built:
    """What a build says besides its file. about: JSON for the engine's entry in engines.json. peak_memory: bytes of
    device memory, where known.
    note: what whoever builds should know."""

    about: Mapping[str, Any] = field(default_factory=dict)
    peak_memory: int | None = None
    note: str | None = None


class Program(Protocol):
    """A loaded engine file, without weights."""

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> Executable:
        """Give each slot the tensors of these names; several are placed one after another along axis 0.

        `weights` may be None where there are no slots. Raises CheckError for a slot without tensors, tensors without a
        slot, or another dtype or shape than the slot's.
        """
        ...


@dataclass(frozen=True)
class CanonicalBytes:
    """An engine file's bytes without those that differ between equal builds; `removed` says in words which these were,
    and why they differ."""

    data: bytes
    removed: tuple[str, ...] = ()


@runtime_checkable
class Backend(Protocol):
    """One inference library on one device."""

    name: str
    suffixes: tuple[str, ...]  # of engine files
    # raised when a change of this code makes other bytes of the same graph and options: nothing older is kept then
    revision: int
    precisions: tuple[str, ...]
    # a request's logits are the same bits whatever runs beside it, and where its prompt was found
    batch_invariant: bool
    takes_long: bool  # a build is worth a line of progress for each engine, and a record of what each took
    rank_devices: bool  # each rank of a split model runs on a device of its own, by `executor`; else all on the host

    def version(self) -> str:
        """The library's version; an engine is for exactly this one."""
        ...

    def describe_device(self) -> dict[str, Any]:
        """JSON of the device. `device_key` picks what an engine depends on."""
        ...

    def device_key(self, device: Mapping[str, Any]) -> Any:
        """The part of a device's description that must be equal for an engine to be loaded; comparable and
        printable."""
        ...

    def default_options(self) -> dict[str, Any]:
        """The build options as they are recorded."""
        ...

    def options_key(self, options: Mapping[str, Any]) -> Any:
        """The part of the options that must be equal for an engine that lies there to be kept; what else must hold,
        `keeps` says."""
        ...

    def graphs(self, assembly: Assembly, options: Mapping[str, Any]) -> Iterator[tuple[str, GraphFile]]:
        """(engine name, graph) of the engines that this backend runs an assembly with: `assembly.engine_graphs()`,
        unless its attention is its own. A `RopeGraph` stands for RoPE alone, which is cut out of the
        graph and given to `build` as it is, a `BaseGraph` for the graph without room for adapters."""
        ...

    def file(self, name: str) -> str:
        """The name of the file of an engine."""
        ...

    def start(self, folder: Path, manifest: EngineSetManifest, names: Sequence[str]) -> None:
        """Before the engines of a set, which have these names, are built in `folder`; manifest: engines.json without
        engines. Raises InputError where what runs them is not installed here."""
        ...

    def keeps(self, name: str, entry: EngineFile) -> bool:
        """Whether an engine that lies there, made in the same way, need not be built again."""
        ...

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        """Build the ONNX graph to an engine file. Raises CheckError when the library refuses the graph, or makes
        something else of it."""
        ...

    def finish(self, names: Sequence[str]) -> Mapping[str, Any]:
        """After them; what engines.json says of the whole set besides: JSON. names: of all its engines."""
        ...

    def load(
        self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0
    ) -> Program:
        """Load an engine file whose weight inputs are `slots`. rank: whose device it is for (`rank_devices`)."""
        ...

    def choices(self, engine_path: Path) -> Any:
        """JSON of what the library chose when it built the engine: its kernels, tactics, fusions. Equal for engines
        that compute in the same way."""
        ...

    def layer_information(self, engine_path: Path) -> Any:
        """JSON of the engine's layers, as much as the library tells: order, operators, attributes, types of values."""
        ...

    def canonical_bytes(self, engine_path: Path) -> CanonicalBytes:
        """The engine file's bytes that two equal builds share: all of them, where the library allows that."""
        ...

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """A contiguous buffer, not initialised."""
        ...

    def executor(
        self, network: Network, rows: int, max_seq_len: int, max_num_tokens: int | None, kv_bytes: float | None
    ) -> Executor | None:
        """What runs steps of a network of this backend's engines, on the devices of all its ranks; None: the runtime's
        own, on host arrays."""
        ...


@runtime_checkable
class HasActivations(Protocol):
    """A backend whose engines may have other activations than their graphs."""

    def activations(self, precision: str) -> str:
        """The dtype of activations in engines of this precision, by NumPy's name."""
        ...


@runtime_checkable
class CutsGraphs(Protocol):
    """A backend that brings some graphs into form by itself."""

    def takes_as_it_is(self, model: onnx.ModelProto) -> bool:
        """Whether `build` is given the canonical graph, with room for adapters if it has some."""
        ...


def get_backend(name: str) -> Backend:
    """The backend of this name. Raises InputError for an unknown name or a library that is not installed."""
    known = sorted(path.parent.name for path in Path(__file__).parent.glob("*/backend.py"))
    if name not in known:
        raise InputError(f"backend: expected one of {', '.join(known)}, found {name!r}")
    try:
        return importlib.import_module(_MODULE.replace("*", name)).BACKEND()
    except ModuleNotFoundError as error:
        raise InputError(
            f"backend {name}: needs the Python package {error.name!r}, which is not installed here; install it"
        ) from None
