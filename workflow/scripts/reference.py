"""checkpoint.json -> the tokens and logits of transformers, at one layer count."""

from job import job


@job(snakemake)
def reference():
    from pathlib import Path

    from lockstep.targets import layer_count
    from lockstep.verify import golden

    golden.make_reference(
        Path(snakemake.input.checkpoint),
        layer_count(snakemake.wildcards.layers),
        snakemake.params.golden,
        Path(snakemake.output.manifest),
    )
