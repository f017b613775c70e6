"""Checkpoint folder -> architecture.json."""

from pathlib import Path

from job import run_stage

# A checkpoint that another job brings lies where its manifest says.
sides = snakemake.input.sides
folder = Path(sides[0]).parent if sides and not snakemake.input.fetched else None
run_stage("architecture", snakemake, folder=folder)
