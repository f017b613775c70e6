"""A server on the engine set against the golden check."""

from __future__ import annotations

from typing import Any

from lockstep.stages.stage import ONNX, RUNTIME, Config, Job, Names, Stage, arguments, bounds
from lockstep.targets import Target


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
        "grpcio", "jinja2", "llguidance", "msgspec", "prometheus-client", "protobuf", "starlette", "uvicorn", "uvloop",
        *ONNX,
    )  # fmt: skip
    help = "A server on the engine set against the golden check."
    is_check = is_judged = is_named = runs_engines = True
    runs_here = True  # the server's own process opens the engines, in the interpreter of the backend

    def needed(self, config: Config, target: Target) -> bool:
        return config.check_server and super().needed(config, target)

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return bounds(config, names)

    def run(self, job: Job) -> None:
        from lockstep.serve.check import check

        check(**arguments(job), python=job.python)
