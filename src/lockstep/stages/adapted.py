"""Engine set with several adapters in one batch against the reference of each."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.statement import BuildKey
from lockstep.stages.stage import Job, Pinned, Stage, arguments


class Adapted(Stage):
    is_check = is_judged = True

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        prompts = AdaptedReport.load(manifest).prompts
        items = {f"{prompt.adapter}: {prompt.text}": " ".join(map(str, prompt.tokens)) for prompt in prompts}
        names = key.names
        return (self.name, names["backend"], names["layers"], names["precision"]), items

    def run(self, job: Job) -> None:
        from lockstep.verify.golden.adapted import check

        check(**arguments(job), expected=job.options["adapted_expected"])
