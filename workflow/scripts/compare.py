"""Engines against their graphs in ONNX Runtime -> the report of the comparison."""

from job import run_stage

run_stage("compare", snakemake)
