"""Each engine against its graph in ONNX Runtime."""

from __future__ import annotations

from lockstep.stages.stage import Job, Stage
from lockstep.targets import Limits
from lockstep.tolerances import Tolerances


class Compare(Stage):
    is_check = is_judged = True

    def run(self, job: Job) -> None:
        from lockstep.verify.compare import run

        run(
            job.inputs["assembly"],
            job.inputs["weights"],
            job.inputs["engines"],
            Tolerances(**job.options["tolerance"]),
            Limits(**job.options["engine_limits"]),
            job.output,
            job.threads,
            job.options["seconds"],
            job.options["seed"],
        )
