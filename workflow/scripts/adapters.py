"""Folders of adapters -> adapters.json."""

from job import logged, run_stage

with logged(snakemake):
    run_stage(snakemake, adapters=dict(snakemake.params.adapters))
