"""The command that lists targets: `lockstep targets`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lockstep.cli.options import CONFIG, JSON, RESULTS
from lockstep.cli.terminal import echo_json
from lockstep.targets import Results


@click.command()
@JSON
@CONFIG
@RESULTS
def targets(config_file: Path | None, results: Path, as_json: bool) -> None:
    """List the targets of a config."""
    from lockstep.config.load import load_config

    chosen = load_config(config_file, Results(results)).targets()
    if as_json:
        return echo_json({"targets": [{"name": str(target), **asdict(target)} for target in chosen]})
    for target in chosen:
        click.echo(target)
