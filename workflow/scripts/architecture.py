"""Checkpoint folder -> architecture.json: the manifest without weights."""

from job import job

with job(snakemake.log[0]):
    from pathlib import Path

    from lockstep import checkpoint

    checkpoint.resolve_architecture(snakemake.params.source, Path(snakemake.input.sides[0]).parent, Path(snakemake.output[0]))
