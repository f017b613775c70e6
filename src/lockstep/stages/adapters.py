"""Folders of LoRA adapters -> adapters.json, compared with the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.build_record import BuildKey
from lockstep.stages.stage import Config, Job, Names, Pinned, Stage, artefacts


class Adapters(Stage):
    output = "{model}/adapters.json"
    reads = artefacts("checkpoint")
    brought = {"fetched": "{model}/adapter_sources.json"}
    help = "Folders of LoRA adapters -> adapters.json, compared with the checkpoint."
    only_adapters = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        settings = config.models[names["model"]]
        targets = settings.lora_target_modules
        return {
            "sources": {name: adapter.source for name, adapter in sorted(settings.adapters.items())},
            "max_lora_rank": settings.max_lora_rank,
            "targets": None if targets is None else list(targets),
        }

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        adapters = AdaptersManifest.load(manifest).adapters
        files = {f"{name}/{file.path}": file.sha256 for name, adapter in adapters.items() for file in adapter.files}
        commits = {f"{name}/commit": adapter.commit for name, adapter in adapters.items() if adapter.commit}
        return (self.name,), {**files, **commits}

    def run(self, job: Job) -> None:
        """given: `adapters`, their folders by name."""
        from lockstep.weights.check_adapters import resolve_adapters

        resolve_adapters(
            job.options["sources"],
            {name: Path(folder) for name, folder in job.given["adapters"].items()},
            job.inputs["checkpoint"],
            job.options["max_lora_rank"],
            job.options["targets"],
            job.output,
        )
