"""Engine set, weights and reference -> whether the engine set says the same, and how fast."""

from job import job


@job(snakemake)
def golden():
    from pathlib import Path

    from lockstep import golden
    from lockstep.paths import Target, layer_count

    names = snakemake.wildcards
    golden.check(
        Path(snakemake.input.assembly),
        Path(snakemake.input.weights),
        Path(snakemake.input.engines),
        Path(snakemake.input.reference),
        Target(names.model, names.precision, layer_count(names.layers), names.backend),
        snakemake.params.tolerance,
        snakemake.params.limits,
        Path(snakemake.output.check),
        Path(snakemake.output.speed),
        snakemake.params.expected,
        snakemake.threads,
    )
