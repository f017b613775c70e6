"""Write the config as it is used: all files merged, all defaults filled in."""

from job import job


@job(snakemake)
def config():
    from lockstep.artifacts.files import write_json

    write_json(snakemake.output[0], snakemake.params.config)
