"""The commands that list targets and print graphs: `lockstep targets`, `lockstep show GRAPH`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lockstep.cli.stages import CONFIG, RESULTS, load_config
from lockstep.cli.terminal import JSON, echo_json
from lockstep.errors import InputError
from lockstep.targets import Results


@click.command()
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also which block class, attention variant and exit each layer uses, of the models that are exported.",
)
@JSON
@CONFIG
@RESULTS
def targets(config_file: Path | None, results: Path, verbose: bool, as_json: bool) -> None:
    """List the targets of a config."""
    chosen = load_config(config_file).targets()
    if as_json:
        if verbose:
            raise InputError("targets: expected --json or --verbose, found both; --verbose is text for a person")
        return echo_json({"targets": [{"name": str(target), **asdict(target)} for target in chosen]})
    exported = {
        (target.model, target.precision): Results(results).assembly(target.model, target.precision) for target in chosen
    }
    if verbose and not any(path.is_file() for path in exported.values()):
        raise InputError(
            f"{next(iter(exported.values()))}: expected an assembly, found none, nor one of "
            f"another target; run snakemake first"
        )
    for target in chosen:
        click.echo(target)
    if verbose:
        from lockstep.onnx_tools.show import layer_table

        for (model, precision), path in exported.items():
            click.echo(f"\n{model}/{precision}: " + (layer_table(path) if path.is_file() else "not exported yet"))


@click.command()
@click.argument("graph", type=click.Path(path_type=Path))
def show(graph: Path) -> None:
    """Print a graph so that a person can read it: operators, shapes, slots."""
    from lockstep.onnx_tools.show import show as text

    click.echo(text(graph), nl=False)
