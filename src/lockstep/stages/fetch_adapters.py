"""LoRA adapters on the hub -> adapter_sources.json and their folders."""

from __future__ import annotations

from lockstep.stages.stage import Job, Stage


class FetchAdapters(Stage):
    def run(self, job: Job) -> None:
        from lockstep.checkpoint.hub.adapters import fetch_adapters

        fetch_adapters(job.options["hub_adapters"], job.output)
