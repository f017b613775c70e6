"""checkpoint.json -> tokens and logits of transformers."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.reference import ReferenceManifest
from lockstep.artifacts.statement import BuildKey
from lockstep.stages.stage import Job, Pinned, Stage, tokens


class Reference(Stage):
    is_check = True

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        return ("reference", key.names["layers"]), tokens(ReferenceManifest.load(manifest).prompts)

    def run(self, job: Job) -> None:
        make_reference(job)


def make_reference(job: Job) -> None:
    """Make the reference of a job: of quantised weights or with adapters where these are among its inputs."""
    from lockstep.verify.golden import reference
    from lockstep.verify.golden.terms import GoldenTerms

    golden = "adapted_golden" if "adapters" in job.inputs else "golden"
    reference.make_reference(
        job.inputs["checkpoint"],
        job.layers,
        GoldenTerms.from_json(job.options[golden]),
        job.output,
        job.inputs.get("weights"),
        job.inputs.get("adapters"),
        job.options.get("perplexity_text", ""),
    )
