"""Engine set against the reference, and its speed."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.reports import GoldenReport
from lockstep.artifacts.statement import BuildKey
from lockstep.errors import CheckError
from lockstep.stages.stage import Job, Pinned, Stage, arguments, tokens


class Golden(Stage):
    is_check = is_judged = True

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        names = key.names
        where = ("golden", names["precision"], names["backend"], names["layers"])
        return where, tokens(GoldenReport.load(manifest).prompts)

    def run(self, job: Job) -> None:
        from lockstep.verify.golden.check import check_engines

        check = arguments(job)
        try:
            check_engines(**check, speed_out=job.output.with_suffix(".speed.json"), expected=job.options["expected"])
        except CheckError as error:
            # The next question is which engine the wrong token comes from, so answer it in the same line.
            from lockstep.verify.bisect.explain import explained

            del check["limits"], check["threads"]
            raise explained(error, **check) from None
