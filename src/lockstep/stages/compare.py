"""Each engine against its graph in ONNX Runtime."""

from __future__ import annotations

from typing import Any

from lockstep.stages.stage import Config, Job, Names, Stage, artefacts
from lockstep.targets import Limits
from lockstep.tolerances import Tolerances


class Compare(Stage):
    output = "{model}/{precision}/compare/{backend}.json"
    reads = artefacts("assembly", "weights", "engines")
    help = "Each engine against its graph in ONNX Runtime."
    is_check = is_judged = runs_engines = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return {
            "tolerance": config.tolerance(names["model"], names["precision"], names["backend"]).to_json(),
            "limits": config.engine_limits(),
            "seconds": config.compare_seconds,
            "seed": config.compare_seed,
        }

    def run(self, job: Job) -> None:
        from lockstep.verify.compare import run

        run(
            job.inputs["assembly"],
            job.inputs["weights"],
            job.inputs["engines"],
            Tolerances(**job.options["tolerance"]),
            Limits(**job.options["limits"]),
            job.output,
            job.threads,
            job.options["seconds"],
            job.options["seed"],
        )
