"""Graphs against torch, at one layer count."""

from __future__ import annotations

from typing import Any

from lockstep.stages.stage import Config, Job, Names, Stage, artefacts
from lockstep.tolerances import Tolerances


class Validate(Stage):
    output = "{model}/{precision}/validate/{layers}.json"
    reads = artefacts("assembly", "weights", "checkpoint")
    help = "Graphs against torch, at one layer count."
    is_check = is_judged = is_named = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        tolerance = config.tolerance(names["model"], names["precision"])
        return {"tolerance": tolerance.to_json(), "max_seq_len": config.limits.max_seq_len}

    def run(self, job: Job) -> None:
        from lockstep.verify import validate

        validate.run(
            job.inputs["assembly"],
            job.inputs["weights"],
            job.inputs["checkpoint"],
            job.layers,
            Tolerances(**job.options["tolerance"]),
            job.options["max_seq_len"],
            job.output,
            job.names["model"],
            job.threads,
        )
