"""Checkpoint folder -> checkpoint.json, or architecture.json."""

from pathlib import Path

from job import logged, run_stage

with logged(snakemake):
    sides = snakemake.input.sides
    # None of a checkpoint that another job brings, which lies where its manifest says.
    folder = Path(sides[0]).parent if sides and not snakemake.input.fetched else None
    run_stage(snakemake, folder=folder)
