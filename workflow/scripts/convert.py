"""checkpoint.json -> weights.json in one precision."""

from job import run_stage

run_stage("convert", snakemake)
