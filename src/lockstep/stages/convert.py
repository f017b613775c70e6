"""checkpoint.json -> weights.json in one precision."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.statement import BuildKey
from lockstep.manifests.own_files import clear_unnamed
from lockstep.stages.stage import Job, Pinned, Stage, digests


class Convert(Stage):
    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        return ("weights", key.names["precision"]), digests(manifest)

    def run(self, job: Job) -> None:
        from lockstep.weights.convert import WEIGHTS as FILE
        from lockstep.weights.convert import convert

        # Left by a killed conversion; `convert` would refuse to overwrite it (see `Build.run`).
        clear_unnamed(job.output, lambda path: path.name == FILE)
        convert(job.inputs["checkpoint"], job.names["precision"], job.output, job.inputs.get("assembly"))
