"""The interface of a backend: describe the device, build, load, bind weights, run.

Only a backend's folder imports its library; `lockstep.config.backends` lists the modules of such a folder.

A call of an engine is prepared in four steps, so that the work of each is done once and not at each call:

    Backend.load(engine file)      -> Program      once an engine file; no weights yet
    Program.bind(weights)          -> Executable   once a layer; weights stay where they are unless the library repacks
                                                   them
    Executable.prepare(in, out)    -> run()        once a set of buffers; allocates nothing afterwards
    run()                                          once a step

Buffers are the backend's own arrays (`Backend.empty`): NumPy arrays on a CPU, device arrays elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.dtypes import has_8_bit_activations
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.signature import IO
from lockstep.errors import InputError
from lockstep.plugins import backend_packages
from lockstep.step.advance import Executor
from lockstep.step.executable import Executable, HostExecutable
from lockstep.step.network import Network
from lockstep.weights import Tensors

# The module of a backend, whose BACKEND is the class. It is imported at first use: no backend needs another's library.
_MODULE = "lockstep.backends.*.backend"


@dataclass(frozen=True)
class Built:
    """The result of a build besides its file.

    about: JSON for the engine's entry in engines.json. peak_memory: bytes of device memory, where known. note: a remark
    for the user.
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    peak_memory: int | None = None
    note: str | None = None


class Program(Protocol):
    """A loaded engine file, without weights."""

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> Executable:
        """Return the engine with these weights.

        Each slot is given the tensors of these names; several are placed one after another along axis 0. `weights` may
        be None where there are no slots. Raises CheckError for a slot without tensors, tensors without a slot, or
        another dtype or shape than the slot's.
        """


class Backend(Protocol):
    """One inference library on one device. Backends derive from it; methods with a body here need not be overridden."""

    name: str
    suffixes: tuple[str, ...]  # of engine files
    # raised when a change of this code builds other bytes from the same graph and options: older engines are rebuilt
    revision: int
    precisions: tuple[str, ...]
    # logits of a request have the same bits in any batch, and with any part of its prompt in the prefix cache
    batch_invariant: bool
    on_host: bool  # engines run on this CPU: a step takes as long as it has tokens
    takes_long: bool = False  # a build is worth a line of progress for each engine, and a record of what each took
    activations: str | None = None  # their dtype in engines, by NumPy's name, where it is not the graphs' own
    model_settings: tuple[str, ...] = ()  # of an assembly, which other backends refuse
    polygraphy: str = ""  # options by which Polygraphy runs a graph in this library
    takes_canonical: bool = False  # `build` takes the assembly's graphs, with adapter inputs, unchanged
    portable: bool = False  # engines are the same bytes on all devices of one name; on all CPUs of one architecture
    rank_devices: bool  # each rank of a sharded model has a device, by `executor`; else all ranks run on the host

    def is_batch_invariant(self, assembly: Assembly) -> bool:
        """Return whether engines of the assembly are `batch_invariant` here; int8 kernels are by exception alone."""
        is_mxfp4 = assembly.quantization is not None and assembly.quantization.mxfp4
        return self.batch_invariant and not is_mxfp4 and not has_8_bit_activations(assembly.precision)

    def version(self) -> str:
        """Return the library's version; an engine is for exactly this one."""

    def libraries(self, runs: bool) -> dict[str, str]:
        """Return {library: version} of the others that compute when engines run; runs=False: when they are built."""
        return {}

    def describe_device(self) -> dict[str, Any]:
        """Return the JSON of the device; `device_key` picks what an engine depends on."""

    def device_key(self, device: Mapping[str, Any]) -> Any:
        """Return the part of a device's description that must be equal for an engine to be loaded."""

    def default_options(self) -> dict[str, Any]:
        """Return the build options as they are recorded."""

    def options_key(self, options: Mapping[str, Any]) -> Any:
        """Return what must be equal of the options for an earlier engine to be kept; see `keeps` for the rest."""
        return dict(options)

    def graphs(self, assembly: Assembly, options: Mapping[str, Any]) -> Iterator[tuple[str, GraphFile]]:
        """Yield (engine name, graph) of the engines that run an assembly.

        They are `assembly.engine_graphs()`, unless the backend has its own attention. `build` gets only the RoPE of a
        `RopeGraph`, and a `BaseGraph` without its adapter inputs.
        """
        return assembly.engine_graphs()

    def file(self, name: str) -> str:
        """Return the file name of an engine."""
        if name.endswith((".rotary", ".state")):  # graphs that run on the host, whatever runs the engines
            return name + self.suffixes[-1]
        return name + self.suffixes[0]

    def start(self, folder: Path, manifest: EngineSetManifest, names: Sequence[str]) -> None:
        """Prepare to build the engines of these names in `folder`.

        manifest: engines.json without engines. Raises InputError for a missing library that the engines need to run.
        """
        return None

    def keeps(self, name: str, entry: EngineFile) -> bool:
        """Return whether an engine of an earlier build was made in the same way."""
        return True

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        """Build the ONNX graph to an engine file. Raises CheckError where the library refuses or changes it."""

    def finish(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Finish a set of engines of these names; return further JSON for engines.json."""
        return {}

    def load(
        self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0
    ) -> Program:
        """Load an engine file whose weight inputs are `slots`, for a rank's device (`rank_devices`)."""

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """Return a contiguous buffer that is not initialised."""
        return np.empty(shape, dtype)

    def executor(
        self,
        networks: Sequence[Network],
        rows: int,
        max_seq_len: int,
        max_num_tokens: int | None,
        kv_bytes: float | None,
    ) -> Executor | None:
        """Return an executor of networks on their ranks' devices; None: the runtime's own, on the host."""
        return None

    def decode_layers(self, network: Network, weights: Tensors) -> HostExecutable | None:
        """Return all layers of a network as one engine for rows that decode; None where their own are as fast.

        weights: of the network, whose blocks may be those of another checkpoint.

        The engine's inputs are the step's values, `past_lengths`, and each layer's keys and values as
        `<layer>.past_key` and `<layer>.past_value`, to which it writes. Outputs are what the exit reads, as
        `<value>_out`. Its bits are those of the engines that it is made of.
        """
        return None


def get_backend(name: str) -> Backend:
    """Return the backend of this name. Raises InputError for an unknown one, or a library that is absent."""
    packages = backend_packages()
    if name not in packages:
        raise InputError(f"backend: expected one of {', '.join(packages)}, found {name!r}")
    try:
        return importlib.import_module(_MODULE.replace("lockstep.backends.*", packages[name])).BACKEND()
    except ModuleNotFoundError as error:
        raise InputError(
            f"backend {name}: needs the Python package {error.name!r}, which is not installed here; install it"
        ) from None
