"""Engine set and weights -> how far each engine is from its graph in ONNX Runtime."""

from job import job


@job(snakemake)
def compare():
    from lockstep.pipeline import worker

    worker.call(
        snakemake.params.python,
        "compare",
        assembly=str(snakemake.input.assembly),
        weights=str(snakemake.input.weights),
        engines=str(snakemake.input.engines),
        tolerance=float(snakemake.params.tolerance),
        limits=dict(snakemake.params.limits),
        out=str(snakemake.output[0]),
        threads=snakemake.threads,
    )
