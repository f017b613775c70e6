"""The config as it is used: all files merged, all defaults filled in -> config.json."""

from job import run_stage

run_stage("config", snakemake)
