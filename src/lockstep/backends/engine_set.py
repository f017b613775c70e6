"""An open engine set: rejected if it was built on another device, or changed since."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.artifacts.adapters import rows_of
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.signature import IO
from lockstep.backends.base import Backend, Program, get_backend
from lockstep.errors import CheckError


class EngineSet:
    """Checked engines of one assembly on one backend."""

    def __init__(self, path: Path, manifest: EngineSetManifest, assembly: Assembly, backend: Backend):
        self.path = path
        self.manifest = manifest
        self.assembly = assembly
        self.backend = backend

    @classmethod
    def open(cls, engines_json: str | os.PathLike, assembly_json: str | os.PathLike) -> EngineSet:
        """Open and check an engine set.

        Raises CheckError, with the value recorded and the value found, for another version of the library, another
        device, a damaged or missing engine file or one of another kind, or graphs of another export; InputError for a
        file that is no manifest.
        """
        path = Path(engines_json)
        assembly = Assembly.load(assembly_json)
        manifest = EngineSetManifest.load(path)
        backend = get_backend(manifest.backend)
        build_here = "build the engines again on this machine"
        advice = f"install the version that they were made for, or {build_here}"
        check_same(path, f"{backend.name} version", manifest.backend_version, backend.version(), advice)
        device = backend.describe_device()
        check_same(path, "device", backend.device_key(manifest.device), backend.device_key(device), build_here)
        check_same(path, "precision", manifest.precision, assembly.precision, "open them with their own assembly")
        graphs = dict(backend.graphs(assembly, manifest.options))
        build = f"build the engines of {assembly_json}"
        build_again = f"build the engines again: lockstep run -- --forcerun build -- {path}"
        check_same(path, "engines", sorted(manifest.engines), sorted(graphs), build)
        for name, entry in manifest.engines.items():
            file = path.parent / entry.file
            check_same(path, f"graph of engine {name}", entry.graph_sha256, graphs[name].sha256, build)
            if file.name != backend.file(name):  # a set that an earlier version of this code made
                raise CheckError(
                    f"{path}: engine {name}: expected the file {backend.file(name)}, found {file.name}; {build_again}"
                )
            if not file.is_file():
                raise CheckError(f"{file}: expected the engine {name}, found no file; {build_again}")
            check_same(file, "sha256", entry.sha256, sha256_file(file), f"the file is damaged; {build_again}")
        return cls(path, manifest, assembly, backend)

    @functools.cached_property
    def batch_invariant(self) -> bool:
        """Return whether a request's logits have the same bits in any batch."""
        return self.backend.is_batch_invariant(self.assembly)

    def digest(self) -> str:
        """Return the hex sha256 of backend, version, device key, options, and each engine's digest."""
        return self.manifest.digest_for(self.backend.device_key(self.manifest.device))

    def libraries(self) -> dict[str, str]:
        return self.backend.libraries(True)

    def names(self) -> list[str]:
        return sorted(self.manifest.engines)

    def load(self, name: str, threads: int | None = None, low_memory: bool = False, rank: int = 0) -> Program:
        """Load an engine for a rank's device: a class, `<variant>.prefill` or `<variant>.decode`."""
        return self.backend.load(self.file(name), self.slots(name), threads, low_memory, rank)

    def file(self, name: str) -> Path:
        return self.path.parent / self.manifest.engines[name].file

    def slots(self, name: str) -> tuple[IO, ...]:
        """Return the weight slots of the engine `name`: its graph's, unless the build rewrote it."""
        rewritten = self.manifest.engines[name].slots
        if rewritten is not None:
            return rewritten
        graph = dict(self.backend.graphs(self.assembly, self.manifest.options)).get(name)
        return graph.signature.slots if graph else ()

    def tensors(self, name: str, slots: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return {slot of the engine `name`: tensors}.

        slots: the assembly's {slot: tensors}. A fused slot has those of its parts, one after another; its rows for
        adapters have none.
        """
        parts = self.manifest.engines[name].parts or {slot: [slot] for slot in slots}
        tensors = {}
        for slot, names in parts.items():
            tensors[slot] = list[str]()
            for part in names:
                if part not in rows_of(slot):
                    tensors[slot] += slots[part]
        return tensors


def check_same(where: Path, what: str, recorded: object, actual: object, advice: str) -> None:
    if recorded != actual:
        raise CheckError(f"{where}: {what}: made for {_text(recorded)}, found {_text(actual)}; {advice}")


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
