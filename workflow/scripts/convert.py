"""checkpoint.json -> weights.json of one precision."""

from job import job


@job(snakemake)
def convert():
    from pathlib import Path

    from lockstep import weights

    weights.convert(Path(snakemake.input.checkpoint), snakemake.wildcards.precision, Path(snakemake.output[0]))
