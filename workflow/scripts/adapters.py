"""Folders of adapters -> adapters.json."""

from job import run_stage

run_stage("adapters", snakemake, adapters=dict(snakemake.params.adapters))
