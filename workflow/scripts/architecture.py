"""Checkpoint folder -> architecture.json."""

from job import checkpoint_folder, run_stage

run_stage("architecture", snakemake, folder=checkpoint_folder(snakemake))
