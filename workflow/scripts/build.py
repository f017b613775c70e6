"""assembly.json -> engines.json of one backend and the engines beside it."""

from job import job

with job(snakemake.log[0]):
    from lockstep import worker

    worker.call(
        snakemake.params.python,
        "build",
        assembly=str(snakemake.input.assembly),
        backend=snakemake.wildcards.backend,
        out=str(snakemake.output[0]),
        options=dict(snakemake.params.options),
    )
