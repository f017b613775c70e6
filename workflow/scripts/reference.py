"""checkpoint.json -> tokens and logits of transformers."""

from job import run_stage

run_stage("reference", snakemake)
