"""Dequantised weights and adapters -> tokens and logits of transformers with each."""

from job import run_stage

run_stage("quantized_adapted_reference", snakemake)
