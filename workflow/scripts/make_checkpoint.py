"""A GGUF file, or the config.json of random weights -> source.json and its folder."""

from job import logged, run_stage

with logged(snakemake):
    run_stage(snakemake, path=snakemake.input.path[0])
