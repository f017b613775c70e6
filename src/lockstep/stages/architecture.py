"""Checkpoint folder -> architecture.json: checkpoint.json without weights, so that other weights need no new graphs."""

from __future__ import annotations

from typing import Any

from lockstep.stages.stage import Config, Job, Names, Stage


class Architecture(Stage):
    output = "{model}/architecture.json"
    brought = {"fetched": "{model}/source.json"}

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return {"source": config.models[names["model"]].source}

    def run(self, job: Job) -> None:
        """given: `folder` of the checkpoint, None where a job has brought it."""
        from lockstep import checkpoint
        from lockstep.artifacts.fetched import folder_of

        folder = job.given.get("folder") or folder_of(self.path(job, self.brought["fetched"]))
        checkpoint.resolve_architecture(job.options["source"], folder, job.output)
