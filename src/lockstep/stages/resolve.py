"""Checkpoint folder -> checkpoint.json and architecture.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.stages.stage import Config, Job, Names, Pinned, Stage


class Resolve(Stage):
    output = "{model}/checkpoint.json"
    brought = {"fetched": "{model}/source.json"}
    help = "Checkpoint folder -> checkpoint.json and architecture.json."
    is_reproduced = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return {"source": config.models[names["model"]].source}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        value = CheckpointManifest.load(manifest)
        about = {"source": value.source, **({"commit": value.commit} if value.commit else {})}
        return ("checkpoint",), {**about, **{file.path: file.sha256 for file in value.files}}

    def run(self, job: Job) -> None:
        """given: `folder` of the checkpoint, None where a job has brought it."""
        from lockstep import checkpoint

        folder = job.given.get("folder")
        if folder is None:
            checkpoint.resolve_fetched(self.path(job, self.brought["fetched"]), job.output)
        else:
            checkpoint.resolve(job.options["source"], folder, job.output)
