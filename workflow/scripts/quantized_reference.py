"""Dequantised weights -> tokens and logits of transformers, and how far off they are."""

from job import run_stage

run_stage("quantized_reference", snakemake)
