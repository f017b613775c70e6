"""Folders of LoRA adapters -> adapters.json, compared with the checkpoint."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.statement import BuildKey
from lockstep.stages.stage import Job, Pinned, Stage


class Adapters(Stage):
    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        adapters = AdaptersManifest.load(manifest).adapters
        files = {}
        for name, adapter in adapters.items():
            files.update({f"{name}/{file.path}": file.sha256 for file in adapter.files})
        commits = {f"{name}/commit": adapter.commit for name, adapter in adapters.items() if adapter.commit}
        return (self.name,), {**files, **commits}

    def run(self, job: Job) -> None:
        from lockstep.weights.check_adapters import resolve_adapters

        resolve_adapters(
            job.options["sources"],
            {name: Path(folder) for name, folder in job.files["folders"].items()},
            job.inputs["checkpoint"],
            job.options["max_lora_rank"],
            job.options.get("lora_target_modules"),
            job.output,
        )
