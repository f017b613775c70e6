"""Engines, validations, golden checks and speeds of all targets -> summary.json, summary.csv and the report's pages."""

from job import job


@job(snakemake)
def summary():
    from pathlib import Path

    from lockstep.report import renew
    from lockstep.targets import Results, Target

    targets = [Target.parse(name) for name in snakemake.params.targets]
    renew.write(Results(Path(snakemake.output[0]).parent), targets, not_run=dict(snakemake.params.not_run))
