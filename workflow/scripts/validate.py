"""Graphs against torch -> the report of the validation."""

from job import run_stage

run_stage("validate", snakemake)
