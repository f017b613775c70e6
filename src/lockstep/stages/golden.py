"""Engine set against the reference, and its speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.reports import GoldenReport
from lockstep.errors import CheckError
from lockstep.stages.stage import ONNX, RUNTIME, Finished, Job, Names, Pinned, Stage, bounds, expected, tokens
from lockstep.targets import Limits, Target, Tolerances

if TYPE_CHECKING:
    from lockstep.config.schema import Config


class Golden(Stage):
    output = "{model}/{precision}/golden/{backend}/{layers}.json"
    beside = {"speed": "{model}/{precision}/golden/{backend}/{layers}.speed.json"}
    reads = {
        "assembly": "{model}/{precision}/graphs/assembly.json",
        "weights": "{model}/{precision}/weights.json",
        "engines": "{model}/{precision}/engines/{backend}/engines.json",
        "reference": "{model}/reference/{layers}.json",
    }
    reads_quantized = {"reference": "{model}/{precision}/reference/{layers}.json"}
    code = RUNTIME
    packages = ONNX
    help = "Engine set against the reference, and its speed."
    is_check = is_judged = is_reproduced = is_named = True

    def needed(self, config: Config, target: Target) -> bool:
        return config.is_run(target)

    def required(self, model: Finished) -> bool:
        return model.runs

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        prompts = config.models[names["model"]].golden.prompts
        return {"expected": expected(config, prompts, names), **bounds(config, names)}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        names = key.names
        where = ("golden", names["precision"], names["backend"], names["layers"])
        return where, tokens(GoldenReport.load(manifest).prompts)

    def run(self, job: Job) -> None:
        from lockstep.verify.golden.check import check_engines

        assembly, weights, engines = (job.inputs[name] for name in ("assembly", "weights", "engines"))
        reference, tolerance = job.inputs["reference"], Tolerances(**job.options["tolerance"])
        try:
            check_engines(
                assembly,
                weights,
                engines,
                reference,
                job.target,
                tolerance,
                Limits(**job.options["limits"]),
                job.output,
                self.path(job, self.beside["speed"]),
                job.options["expected"],
                job.threads,
            )
        except CheckError as error:
            from lockstep.verify.bisect.explain import explained

            raise explained(error, assembly, weights, engines, reference, job.target, tolerance, job.output) from None
