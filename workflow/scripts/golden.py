"""Engine set, weights and reference -> whether the engine set says the same, and how fast."""

from job import job


@job(snakemake)
def golden():
    from dataclasses import asdict

    from lockstep.pipeline import worker
    from lockstep.targets import Target, layer_count

    names = snakemake.wildcards
    worker.call(
        snakemake.params.python,
        "golden",
        assembly=str(snakemake.input.assembly),
        weights=str(snakemake.input.weights),
        engines=str(snakemake.input.engines),
        reference=str(snakemake.input.reference),
        target=asdict(Target(names.model, names.precision, layer_count(names.layers), names.backend)),
        tolerance=dict(snakemake.params.tolerance),
        limits=dict(snakemake.params.limits),
        out=str(snakemake.output.check),
        speed=str(snakemake.output.speed),
        expected=list(snakemake.params.expected),
        threads=snakemake.threads,
    )
