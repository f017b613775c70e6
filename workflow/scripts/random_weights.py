"""config.json of a model and a seed -> source.json, and a checkpoint of random weights."""

from job import job

with job(snakemake.log[0]):
    from lockstep import random_model

    random_model.fetch(snakemake.params.source, snakemake.input.config[0], snakemake.output[0])
