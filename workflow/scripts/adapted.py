"""Engines with several adapters in a batch against the reference of each -> the report."""

from job import run_stage

run_stage("adapted", snakemake)
