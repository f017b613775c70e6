"""Checkpoint folder -> architecture.json: checkpoint.json without weights, so that other weights need no new graphs."""

from __future__ import annotations

from pathlib import Path

from lockstep.stages.stage import Job, Stage


class Architecture(Stage):
    def run(self, job: Job) -> None:
        from lockstep import checkpoint
        from lockstep.artifacts.fetched import folder_of

        if "fetched" in job.inputs:
            folder = folder_of(job.inputs["fetched"])
        else:
            folder = Path(job.files["sides"][0]).parent
        checkpoint.resolve_architecture(job.options["source"], folder, job.output)
