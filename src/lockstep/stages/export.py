"""architecture.json -> assembly.json and its graphs."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.statement import BuildKey
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.own_files import clear_unnamed
from lockstep.stages.stage import Job, Pinned, Stage, digests


class Export(Stage):
    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        # The manifest too: only it says which tensor of the checkpoint each weight slot takes.
        items = {**digests(manifest), manifest.name: digest(manifest)}
        return ("graphs", key.names["precision"]), items

    def run(self, job: Job) -> None:
        from lockstep.export.run import export

        # Left by a killed export; names of graphs depend on the model, so all files of the folder go.
        clear_unnamed(job.output, lambda path: True)
        export(job.inputs["architecture"], job.names["precision"], job.output, **job.options)
