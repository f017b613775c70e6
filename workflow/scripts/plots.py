"""summary.json and validations -> the report's plots."""

from pathlib import Path

from job import logged

from lockstep.report import plots

with logged(snakemake):
    validations = [Path(path) for path in snakemake.input.validations]
    plots.error_by_layer(validations, Path(snakemake.output.errors))
    plots.speed(Path(snakemake.input.summary), Path(snakemake.output.speed))
