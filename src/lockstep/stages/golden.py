"""Engine set against the reference, and its speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.reports import GoldenReport
from lockstep.errors import CheckError
from lockstep.stages.stage import Config, Job, Names, Pinned, Stage, arguments, artefacts, bounds, expected, tokens
from lockstep.targets import Results


class Golden(Stage):
    output = "{model}/{precision}/golden/{backend}/{layers}.json"
    beside = {"speed": "{model}/{precision}/golden/{backend}/{layers}.speed.json"}
    reads = artefacts("assembly", "weights", "engines", "reference")
    reads_quantized = {"reference": Results.quantized_reference.pattern}
    help = "Engine set against the reference, and its speed."
    is_check = is_judged = is_reproduced = is_named = runs_engines = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        prompts = config.models[names["model"]].golden.prompts
        return {"expected": expected(config, prompts, names), **bounds(config, names)}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        names = key.names
        where = ("golden", names["precision"], names["backend"], names["layers"])
        return where, tokens(GoldenReport.load(manifest).prompts)

    def run(self, job: Job) -> None:
        from lockstep.verify.golden.check import check_engines

        given = arguments(job)
        try:
            check_engines(**given, speed_out=self.path(job, self.beside["speed"]), expected=job.options["expected"])
        except CheckError as error:
            from lockstep.verify.bisect.explain import explained

            del given["limits"], given["threads"]
            raise explained(error, **given) from None
