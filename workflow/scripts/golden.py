"""Engines against the reference -> the golden report, and the engines' speed."""

from job import run_stage

run_stage("golden", snakemake)
