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
        # Of a build that was killed: `build` overwrites no file that no earlier manifest names, for in a folder of the
        # user's it may be anybody's. A stage has its folder to itself.
        clear_unnamed(job.output, lambda path: path.suffix in suffixes)
        build(job.inputs["assembly"], backend, job.output, job.options["options"])


def engines_place(names: Mapping[str, Any], backend: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the place of engines in a lock. backend: its identity.

    It ends with the device that their bytes depend on: its architecture or name, and for a backend that is not portable
    the first digits of the sha256 of all that must be equal.
    """
    # A backend whose device has neither, for its engines run anywhere, is named itself.
    device = backend["device"]
    name = str(device.get("architecture") or device.get("name") or backend["name"])
    if not backend.get("portable"):
        name += f" {sha256_json(device)[:12]}"
    return ("engines", names["precision"], names["backend"], name)
