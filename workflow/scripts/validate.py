"""Graphs and weights -> how far they are from torch, at one layer count."""

from job import job


@job(snakemake)
def validate():
    from pathlib import Path

    from lockstep.targets import layer_count
    from lockstep.verify import validate

    validate.run(
        Path(snakemake.input.assembly),
        Path(snakemake.input.weights),
        Path(snakemake.input.checkpoint),
        layer_count(snakemake.wildcards.layers),
        snakemake.params.tolerance,
        snakemake.params.max_seq_len,
        Path(snakemake.output[0]),
        snakemake.wildcards.model,
        snakemake.threads,
    )
