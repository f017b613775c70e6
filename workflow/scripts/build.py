"""assembly.json -> engines.json and its engines."""

from job import run_stage

run_stage("build", snakemake)
