"""A server on the engine set against the golden check."""

from __future__ import annotations

from lockstep.plugins import load_plugin
from lockstep.stages.stage import Job, Stage, arguments


class Served(Stage):
    is_check = is_judged = True

    def run(self, job: Job) -> None:
        from lockstep.verify.served.check import check

        # By its entry point: the server is a separate package, which imports this one.
        check(**arguments(job), open_server=load_plugin("server", "open_server"))
