"""assembly.json -> engines.json of one backend and the engines beside it."""

from job import job


@job(snakemake)
def build():
    from pathlib import Path

    from lockstep import engine

    engine.build(Path(snakemake.input.assembly), snakemake.wildcards.backend, Path(snakemake.output[0]))
