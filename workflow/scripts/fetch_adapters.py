"""Adapters on the hub -> adapter_sources.json and their folders."""

from job import run_stage

run_stage("fetch_adapters", snakemake)
