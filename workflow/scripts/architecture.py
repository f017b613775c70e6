"""Checkpoint folder, given or fetched -> architecture.json: the manifest without weights."""

from job import job


@job(snakemake)
def architecture():
    from pathlib import Path

    from lockstep import checkpoint
    from lockstep.artifacts.fetched import folder_of

    fetched = snakemake.input.fetched
    folder = folder_of(Path(fetched[0])) if fetched else Path(snakemake.input.sides[0]).parent
    checkpoint.resolve_architecture(snakemake.params.source, folder, Path(snakemake.output[0]))
