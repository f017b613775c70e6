"""checkpoint.json -> tokens and logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.reference import ReferenceManifest
from lockstep.stages.stage import Config, Job, Names, Pinned, Stage, artefacts, tokens


class Reference(Stage):
    output = "{model}/reference/{layers}.json"
    beside = {"logits": "{model}/reference/{layers}.safetensors"}
    reads = artefacts("checkpoint")
    help = "checkpoint.json -> tokens and logits of transformers."
    is_check = is_cached = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        model = config.models[names["model"]]
        terms = config.reference_terms(names["model"])
        return {"golden": terms, **({"drift_text": model.golden.drift_text} if model.kv_cache_dtype else {})}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        return ("reference", key.names["layers"]), tokens(ReferenceManifest.load(manifest).prompts)

    def run(self, job: Job) -> None:
        make_reference(job)


def make_reference(job: Job) -> None:
    """Make the reference of a job: of quantised weights or with adapters where it reads such."""
    from lockstep.verify.golden import reference
    from lockstep.verify.golden.terms import GoldenTerms

    reference.make_reference(
        job.inputs["checkpoint"],
        job.layers,
        GoldenTerms.from_json(job.options["golden"]),
        job.output,
        job.inputs.get("weights"),
        job.inputs.get("adapters"),
        job.options.get("drift_text", ""),
    )
