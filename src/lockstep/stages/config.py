"""The config as it is used: all files merged, all defaults filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.artifacts.files import write_json
from lockstep.stages.stage import Job, Names, Stage
from lockstep.targets import Target

if TYPE_CHECKING:
    from lockstep.config import schema


class Config(Stage):
    output = "config.json"

    def needed(self, config: schema.Config, target: Target) -> bool:
        return False  # it is of no target

    def options(self, config: schema.Config, names: Names) -> dict[str, Any]:
        return {"config": config.dump()}

    def run(self, job: Job) -> None:
        write_json(job.output, job.options["config"])
