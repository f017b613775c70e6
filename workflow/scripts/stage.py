"""The job of any stage that takes no more than its rule's inputs and parameters."""

from job import logged, run_stage

with logged(snakemake):
    run_stage(snakemake)
