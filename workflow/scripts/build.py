"""assembly.json -> engines.json of one backend and the engines beside it."""

from job import job

with job(snakemake.log[0]):
    from pathlib import Path

    from lockstep import engine

    engine.build(Path(snakemake.input.assembly), snakemake.wildcards.backend, Path(snakemake.output[0]))
