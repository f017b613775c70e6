"""Checkpoint and adapters -> tokens and logits of transformers with each adapter."""

from job import run_stage

run_stage("adapted_reference", snakemake)
