"""assembly.json -> engines.json of one backend and the engines beside it."""

from job import job


@job(snakemake)
def build():
    from lockstep.pipeline import worker

    worker.call(
        snakemake.params.python,
        "build",
        assembly=str(snakemake.input.assembly),
        backend=snakemake.wildcards.backend,
        out=str(snakemake.output[0]),
        options=dict(snakemake.params.options),
    )
