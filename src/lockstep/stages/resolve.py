"""Checkpoint folder -> checkpoint.json."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.statement import BuildKey
from lockstep.stages.stage import Job, Pinned, Stage


class Resolve(Stage):
    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        value = CheckpointManifest.load(manifest)
        items = {"source": value.source, **{file.path: file.sha256 for file in value.files}}
        if value.commit:
            items["commit"] = value.commit
        return ("checkpoint",), items

    def run(self, job: Job) -> None:
        from lockstep import checkpoint

        if "fetched" in job.inputs:
            checkpoint.resolve_fetched(job.inputs["fetched"], job.output)
        else:
            checkpoint.resolve(job.options["source"], Path(job.files["sides"][0]).parent, job.output)
