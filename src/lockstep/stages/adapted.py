"""Engine set with several adapters in one batch against the reference of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.build_record import BuildKey
from lockstep.stages.stage import Config, Job, Names, Pinned, Stage, arguments, artefacts, bounds, expected
from lockstep.targets import Results


class Adapted(Stage):
    output = "{model}/{precision}/adapted/{backend}/{layers}.json"
    reads = artefacts("assembly", "weights", "engines", "adapters", "adapted_reference")
    reads_quantized = {"adapted_reference": Results.quantized_adapted_reference.pattern}
    help = "Engine set with several adapters in one batch against the reference of each."
    is_check = is_judged = is_named = only_adapters = runs_engines = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        prompts = [prompt for each in config.adapter_prompts(names["model"]).values() for prompt in each]
        return {"expected": expected(config, prompts, names), **bounds(config, names)}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        prompts = AdaptedReport.load(manifest).prompts
        items = {f"{prompt.adapter}: {prompt.text}": " ".join(map(str, prompt.tokens)) for prompt in prompts}
        names = key.names
        return (self.name, names["backend"], names["layers"], names["precision"]), items

    def run(self, job: Job) -> None:
        from lockstep.verify.golden.adapted import check

        check(**arguments(job), expected=job.options["expected"])
