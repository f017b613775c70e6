"""A GGUF file, or the config.json of random weights -> source.json and its folder."""

from __future__ import annotations

from pathlib import Path

from lockstep.stages.stage import Job, Stage


class MakeCheckpoint(Stage):
    def run(self, job: Job) -> None:
        from lockstep.export.make_checkpoint import make_checkpoint

        make_checkpoint(job.options["source"], Path(job.files["path"][0]), job.output)
