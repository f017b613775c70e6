"""A model on the hub -> source.json and its folder."""

from __future__ import annotations

from typing import Any

from lockstep.config.sources import HubSource, parse_source
from lockstep.stages.stage import Config, Job, Names, Stage
from lockstep.targets import Target


class Fetch(Stage):
    output = "{model}/source.json"
    help = "A model on the hub, a GGUF file or random weights -> source.json and its folder."
    continues = True

    def needed(self, config: Config, target: Target) -> bool:
        return isinstance(parse_source(config.models[target.model].source), HubSource)

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return {"source": config.models[names["model"]].source}

    def run(self, job: Job) -> None:
        """given: parameters of `hub.fetch`."""
        from lockstep.checkpoint import hub

        hub.fetch(job.options["source"], job.output, **job.given)
