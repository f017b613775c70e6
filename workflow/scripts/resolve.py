"""Checkpoint folder -> checkpoint.json."""

from job import checkpoint_folder, run_stage

run_stage("resolve", snakemake, folder=checkpoint_folder(snakemake))
