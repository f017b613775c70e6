"""The config as it is used: all files merged, all defaults filled in."""

from __future__ import annotations

from lockstep.artifacts.files import write_json
from lockstep.stages.stage import Job, Stage


class Config(Stage):
    def run(self, job: Job) -> None:
        write_json(job.output, job.options["config"])
