"""Engines and checks of all targets -> summary.json, summary.csv and the report's pages."""

from pathlib import Path

from lockstep.report import summary
from lockstep.targets import Results, Target
from lockstep.workflow.job import logged

with logged(snakemake):
    targets = [Target.parse(name) for name in snakemake.params.targets]
    results = Results(Path(snakemake.output[0]).parent)
    summary.summarise(results, targets, dict(snakemake.params.not_run))
