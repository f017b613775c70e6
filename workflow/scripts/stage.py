"""A stage, which the parameter `stage` of its rule names: its inputs -> its manifest."""

from lockstep.workflow.job import run_stage

run_stage(snakemake)
