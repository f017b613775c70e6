"""architecture.json -> assembly.json and the graphs beside it."""

from job import job


@job(snakemake)
def export():
    from pathlib import Path

    from lockstep import export

    export.export(Path(snakemake.input.architecture), snakemake.wildcards.precision, Path(snakemake.output[0]))
