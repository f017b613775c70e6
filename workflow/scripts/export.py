"""architecture.json -> assembly.json and its graphs."""

from job import run_stage

run_stage("export", snakemake)
