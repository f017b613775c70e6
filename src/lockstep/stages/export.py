"""architecture.json -> assembly.json and its graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.own_files import clear_unnamed
from lockstep.stages.stage import Config, Job, Names, Pinned, Stage, artefacts, digests
from lockstep.targets import is_quantized


class Export(Stage):
    output = "{model}/{precision}/graphs/assembly.json"
    # Not checkpoint.json: other weights for the same model need no new graphs, and so no new engines.
    reads = artefacts("architecture")
    help = "architecture.json -> assembly.json and its graphs."
    is_cached = is_reproduced = owns_folder = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        settings = config.models[names["model"]]
        quantized = is_quantized(names["precision"])
        targets = settings.lora_target_modules
        adapters = {  # not which: another adapter changes no graph
            "max_adapters": settings.max_adapters,
            "max_lora_rank": settings.max_lora_rank,
            "targets": None if targets is None else list(targets),
        }
        options = {
            "tensor_parallel": settings.tensor_parallel if settings.tensor_parallel > 1 else None,
            "adapters": adapters if settings.adapters else None,
            "group_size": settings.group_size if quantized else None,
            "head_bits": settings.head_bits if quantized else None,
            "residual": settings.residual if names["precision"] == "fp16" else None,
            "kv_cache_dtype": settings.kv_cache_dtype,
        }
        return {name: value for name, value in options.items() if value is not None}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        items = {**digests(manifest), manifest.name: digest(manifest)}
        return ("graphs", key.names["precision"]), items

    def run(self, job: Job) -> None:
        from lockstep import export

        clear_unnamed(job.output, lambda path: True)
        export.export(job.inputs["architecture"], job.names["precision"], job.output, **job.options)
