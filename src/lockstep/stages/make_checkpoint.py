"""A GGUF file, or the config.json of random weights -> source.json and its folder."""

from __future__ import annotations

from typing import Any

from lockstep.config.sources import GgufSource, RandomSource, parse_source
from lockstep.stages.stage import Config, Job, Names, Stage
from lockstep.targets import Target


class MakeCheckpoint(Stage):
    output = "{model}/source.json"

    def needed(self, config: Config, target: Target) -> bool:
        return isinstance(parse_source(config.models[target.model].source), (GgufSource, RandomSource))

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return {"source": config.models[names["model"]].source}

    def run(self, job: Job) -> None:
        """given: `path` of the file."""
        from lockstep.export.make_checkpoint import make_checkpoint

        make_checkpoint(job.options["source"], job.given["path"], job.output)
