"""A GGUF file, or the config.json of random weights -> source.json and its folder."""

from job import run_stage

run_stage("make_checkpoint", snakemake, path=snakemake.input.path[0])
