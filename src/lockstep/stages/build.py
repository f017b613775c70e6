"""assembly.json -> the engine set of one backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import sha256_json
from lockstep.artifacts.statement import BuildKey
from lockstep.manifests.own_files import clear_unnamed
from lockstep.stages.stage import Job, Pinned, Stage


class Build(Stage):
    builds_engines = True

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        items = {entry.file: entry.sha256 for entry in EngineSetManifest.load(manifest).engines.values()}
        return engines_place(key.names, key.backend or {}), items

    def run(self, job: Job) -> None:
        from lockstep.backends.base import get_backend
        from lockstep.backends.builder import build

        backend = job.backend
        assert backend is not None  # it is a wildcard of the stage
        suffixes = get_backend(backend).suffixes
        # Left by a killed build. `build` refuses to overwrite files that no earlier manifest names, as they may be
        # anybody's in a user's folder; a stage owns its folder.
        clear_unnamed(job.output, lambda path: path.suffix in suffixes)
        build(job.inputs["assembly"], backend, job.output, job.options["options"])


def engines_place(names: Mapping[str, Any], backend: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the place of engines in a lock. backend: its identity.

    It ends with the device that their bytes depend on: its architecture or name, and for a backend that is not portable
    the first digits of the sha256 of all that must be equal.
    """
    # Engines that run anywhere have a device with neither: use the backend's name.
    device = backend["device"]
    name = str(device.get("architecture") or device.get("name") or backend["name"])
    if not backend.get("portable"):
        name += f" {sha256_json(device)[:12]}"
    return ("engines", names["precision"], names["backend"], name)
