"""The common part of backends whose engines run on the CPU here, on NumPy arrays.

A backend derives from `HostBackend` and adds the rest of `lockstep.backends.base.Backend`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.backends.base import CanonicalBytes
from lockstep.backends.cpu import cpu_key, describe_cpu
from lockstep.step.network import Network


class HostBackend:
    """A backend whose engines run on the CPU and depend on its instruction sets; equal builds are equal bytes."""

    ending: str  # of the name of an engine's file
    takes_long = False
    rank_devices = False
    activations: str | None = None
    takes_canonical = False

    def libraries(self, runs: bool) -> dict[str, str]:
        return {}

    def describe_device(self) -> dict[str, Any]:
        return {"type": "cpu", **describe_cpu()}

    def device_key(self, device: Mapping[str, Any]) -> Any:
        return cpu_key(device)

    def options_key(self, options: Mapping[str, Any]) -> Any:
        return dict(options)

    def graphs(self, assembly: Assembly, options: Mapping[str, Any]) -> Iterator[tuple[str, GraphFile]]:
        return assembly.engine_graphs()

    def file(self, name: str) -> str:
        return name + self.ending

    def start(self, folder: Path, manifest: EngineSetManifest, names: Sequence[str]) -> None:
        pass

    def keeps(self, name: str, entry: EngineFile) -> bool:
        return True

    def finish(self, names: Sequence[str]) -> dict[str, Any]:
        return {}

    def canonical_bytes(self, engine_path: Path) -> CanonicalBytes:
        return CanonicalBytes(engine_path.read_bytes())

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def executor(
        self, network: Network, rows: int, max_seq_len: int, max_num_tokens: int | None, kv_bytes: float | None
    ) -> None:
        return None


class Declared(NamedTuple):
    """The dtype and shape that an engine declares for an input or output; dimensions are numbers or names."""

    dtype: np.dtype
    shape: Sequence[int | str]
