"""A model on the hub -> source.json and its folder."""

from __future__ import annotations

from lockstep.stages.stage import Job, Stage


class Fetch(Stage):
    def run(self, job: Job) -> None:
        from lockstep.checkpoint import hub

        hub.fetch(job.options["source"], job.output, **job.extra)
