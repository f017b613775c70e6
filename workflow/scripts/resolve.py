"""Checkpoint folder -> checkpoint.json."""

from job import job

with job(snakemake.log[0]):
    from pathlib import Path

    from lockstep import checkpoint

    checkpoint.resolve(snakemake.params.source, Path(snakemake.input.sides[0]).parent, Path(snakemake.output[0]))
