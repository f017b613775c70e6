"""summary.json and validations -> the report's plots."""

from job import job


@job(snakemake)
def plots():
    from pathlib import Path

    from lockstep.report import plots

    plots.error_by_layer([Path(path) for path in snakemake.input.validations], Path(snakemake.output.errors))
    plots.speed(Path(snakemake.input.summary), Path(snakemake.output.speed))
