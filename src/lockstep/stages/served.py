"""A server on the engine set against the golden check."""

from __future__ import annotations

from lockstep.stages.stage import Job, Stage, arguments


class Served(Stage):
    is_check = is_judged = True

    def run(self, job: Job) -> None:
        from lockstep.serve.check import check

        check(**arguments(job))
