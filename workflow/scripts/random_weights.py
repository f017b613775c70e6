"""config.json of a model and a seed -> source.json, and a checkpoint of random weights."""

from job import job


@job(snakemake)
def random_weights():
    from lockstep.export import random_model

    random_model.fetch(snakemake.params.source, snakemake.input.config[0], snakemake.output[0])
