"""LoRA adapters on the hub -> adapter_sources.json and their folders."""

from __future__ import annotations

from typing import Any

from lockstep.config.sources import HubSource, parse_source
from lockstep.stages.stage import Config, Job, Names, Stage
from lockstep.targets import Target


class FetchAdapters(Stage):
    output = "{model}/adapter_sources.json"
    help = "LoRA adapters on the hub -> adapter_sources.json and their folders."
    continues = only_adapters = True

    def needed(self, config: Config, target: Target) -> bool:
        return bool(on_hub(config, target.model))

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return {"sources": on_hub(config, names["model"])}

    def run(self, job: Job) -> None:
        from lockstep.checkpoint.hub.adapters import fetch_adapters

        fetch_adapters(job.options["sources"], job.output)


def on_hub(config: Config, model: str) -> dict[str, str]:
    """Return the sources of a model's adapters that lie on the hub, by name."""
    adapters = sorted(config.models[model].adapters.items())
    return {name: entry.source for name, entry in adapters if isinstance(parse_source(entry.source), HubSource)}
