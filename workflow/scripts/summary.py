"""Engines, validations, golden checks and speeds of all targets -> summary.json, summary.csv and the report's table."""

from job import job


@job(snakemake)
def summary():
    from pathlib import Path

    from lockstep.report import summary
    from lockstep.targets import Results, Target

    summary.write(
        Results(Path(snakemake.output.json).parent), [Target.parse(name) for name in snakemake.params.targets]
    )
