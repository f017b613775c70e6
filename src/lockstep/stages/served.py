"""A server on the engine set against the golden check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.stages.stage import ONNX, RUNTIME, Finished, Job, Names, Stage, bounds
from lockstep.targets import Limits, Target, Tolerances

if TYPE_CHECKING:
    from lockstep.config.schema import Config


class Served(Stage):
    output = "{model}/{precision}/served/{backend}/{layers}.json"
    reads = {
        "assembly": "{model}/{precision}/graphs/assembly.json",
        "weights": "{model}/{precision}/weights.json",
        "engines": "{model}/{precision}/engines/{backend}/engines.json",
        "reference": "{model}/reference/{layers}.json",
        "golden": "{model}/{precision}/golden/{backend}/{layers}.json",
    }
    reads_quantized = {"reference": "{model}/{precision}/reference/{layers}.json"}
    code = (*RUNTIME, "processes.py", "serve")
    packages = (
        "grpcio",
        "jinja2",
        "llguidance",
        "msgspec",
        "prometheus-client",
        "protobuf",
        "starlette",
        "uvicorn",
        "uvloop",
        *ONNX,
    )
    help = "A server on the engine set against the golden check."
    is_check = is_judged = is_named = True
    runs_here = True  # the server's own process opens the engines, in the interpreter of the backend

    def needed(self, config: Config, target: Target) -> bool:
        return config.is_run(target) and config.check_server

    def required(self, model: Finished) -> bool:
        return model.runs and model.is_served

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return bounds(config, names)

    def run(self, job: Job) -> None:
        from lockstep.serve.check import check

        check(
            job.inputs["assembly"],
            job.inputs["weights"],
            job.inputs["engines"],
            job.inputs["reference"],
            job.inputs["golden"],
            job.target,
            Tolerances(**job.options["tolerance"]),
            Limits(**job.options["limits"]),
            job.output,
            job.python,
            job.threads,
        )
