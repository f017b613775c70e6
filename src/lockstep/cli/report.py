"""The commands that show the checks: `lockstep summary`, `lockstep report`."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.opened import used_config
from lockstep.cli.stages import RESULTS
from lockstep.cli.terminal import JSON, echo_json
from lockstep.targets import Results


@click.command()
@JSON
@RESULTS
def summary(as_json: bool, results: Path) -> None:
    """Print all checks as they stand now.

    It changes nothing.
    """
    from lockstep.report import summary as stage

    tree = Results(results)
    config = used_config(tree)
    found = stage.collect(tree, config.targets(), config.not_run())
    if as_json:
        return echo_json(found.to_json())
    stage.print_table(found)
    stage.print_verdict(found)
    for path, what in ((tree.summary(), "Summary"), (tree.report_page(), "Report")):
        if path.is_file():
            click.echo(f"{what}: {path}")


@click.command()
@JSON
@RESULTS
def report(as_json: bool, results: Path) -> None:
    """Write the summary and the report's pages anew."""
    from lockstep.report.renew import summarise

    tree = Results(results)
    config = used_config(tree)
    written = summarise(tree, config.targets(), config.not_run())
    if as_json:
        return echo_json({"report": str(tree.report_page()), "summary": str(written)})
    click.echo(tree.report_page())
