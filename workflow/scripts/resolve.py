"""Checkpoint folder, given or fetched -> checkpoint.json."""

from job import job


@job(snakemake)
def resolve():
    from pathlib import Path

    from lockstep import checkpoint

    out = Path(snakemake.output[0])
    if snakemake.input.fetched:
        checkpoint.resolve_fetched(Path(snakemake.input.fetched[0]), out)
    else:
        checkpoint.resolve(snakemake.params.source, Path(snakemake.input.sides[0]).parent, out)
