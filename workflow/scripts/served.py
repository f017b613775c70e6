"""A server on the engines against the golden report -> the report of the server check."""

from job import run_stage

run_stage("served", snakemake)
