"""The commands that show the checks: `lockstep summary`, `lockstep report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.opened import used_config
from lockstep.cli.options import JSON, RESULTS
from lockstep.cli.terminal import echo_json
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.artifacts.summary import Summary


@click.command()
@JSON
@RESULTS
def summary(as_json: bool, results: Path) -> None:
    """Print the current results of all checks. It changes nothing."""
    tree = Results(results)
    if as_json:
        return echo_json(_collect(tree).to_json())
    print_summary(tree)


def print_summary(tree: Results) -> None:
    """Print the table of targets, the verdict, the report's path, and how to serve. Raises InputError without a run."""
    from lockstep.report import summary as stage
    from lockstep.report.verdict import advice

    reports = _collect(tree)
    stage.print_table(reports)
    stage.print_verdict(reports)
    if tree.report_page().is_file():
        click.echo(f"Report: {tree.report_page()}")
    for line in advice(reports):
        click.echo(line)


def _collect(tree: Results) -> Summary:
    from lockstep.report.summary import collect

    config = used_config(tree)
    return collect(tree, config.targets(), config.not_run())


@click.command()
@JSON
@RESULTS
def report(as_json: bool, results: Path) -> None:
    """Write the summary and the report's pages again."""
    from lockstep.report.summary import summarise

    tree = Results(results)
    config = used_config(tree)
    written = summarise(tree, config.targets(), config.not_run())
    if as_json:
        return echo_json({"report": str(tree.report_page()), "summary": str(written)})
    click.echo(tree.report_page())
