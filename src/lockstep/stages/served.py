"""A server on the engine set against the golden check."""

from __future__ import annotations

from typing import Any

from lockstep.stages.stage import Config, Job, Names, Stage, arguments, artefacts, bounds
from lockstep.targets import Results, Target


class Served(Stage):
    output = "{model}/{precision}/served/{backend}/{layers}.json"
    reads = artefacts("assembly", "weights", "engines", "reference", "golden")
    reads_quantized = {"reference": Results.quantized_reference.pattern}
    help = "A server on the engine set against the golden check."
    is_check = is_judged = is_named = runs_engines = True

    def needed(self, config: Config, target: Target) -> bool:
        return config.check_server and super().needed(config, target)

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return bounds(config, names)

    def run(self, job: Job) -> None:
        from lockstep.serve.check import check

        check(**arguments(job))
