"""assembly.json -> the engine set of one backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import sha256_json
from lockstep.manifests.own_files import clear_unnamed
from lockstep.stages.stage import ENGINES, ONNX, Config, Job, Names, Pinned, Stage, artefacts
from lockstep.targets import Target


class Build(Stage):
    output = "{model}/{precision}/engines/{backend}/engines.json"
    reads = artefacts("assembly")
    code = ENGINES
    packages = ONNX
    help = "assembly.json -> the engine set of one backend."
    is_cached = is_reproduced = continues = owns_folder = True

    def needed(self, config: Config, target: Target) -> bool:
        return config.is_built(target)

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return {"options": config.build_options(names["backend"])}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        names, device = key.names, device_name(key.backend or {})
        items = {entry.file: entry.sha256 for entry in EngineSetManifest.load(manifest).engines.values()}
        return ("engines", names["precision"], names["backend"], device), items

    def run(self, job: Job) -> None:
        from lockstep import backends

        backend = job.backend
        assert backend is not None  # it is a wildcard of the stage
        suffixes = backends.get_backend(backend).suffixes
        clear_unnamed(job.output, lambda path: path.suffix in suffixes)  # of a build that was killed
        backends.build(job.inputs["assembly"], backend, job.output, job.options["options"])


def device_name(backend: Mapping[str, Any]) -> str:
    """Return the name of a device in a lock, from a backend's identity.

    It is the architecture or name, and the first digits of the sha256 of all that must be equal.
    """
    device = backend["device"]
    return f"{device.get('architecture') or device.get('name') or backend['name']} {sha256_json(device)[:12]}"
