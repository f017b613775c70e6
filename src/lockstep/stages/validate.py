"""Graphs against torch, at one layer count."""

from __future__ import annotations

from lockstep.stages.stage import Job, Stage
from lockstep.tolerances import Tolerances


class Validate(Stage):
    is_check = is_judged = True

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
