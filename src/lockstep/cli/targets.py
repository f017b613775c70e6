"""The commands that list targets and print graphs: `lockstep targets` and `lockstep show GRAPH`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lockstep.cli.options import CONFIG, JSON, PATH, RESULTS
from lockstep.cli.terminal import echo_json
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
    from lockstep.config.load import load_given

    chosen = load_given(config_file, Results(results)).targets()
    exported = {
        (target.model, target.precision): Results(results).assembly(target.model, target.precision) for target in chosen
    }
    if verbose and not any(path.is_file() for path in exported.values()):
        raise InputError(
            f"{next(iter(exported.values()))}: expected an assembly, found none, nor one of "
            f"another target; run `lockstep run` first"
        )
    if as_json:
        listing = {"targets": [{"name": str(target), **asdict(target)} for target in chosen]}
        if verbose:
            listing["graphs"] = [
                {"model": model, "precision": precision, **_layers(path)}
                for (model, precision), path in exported.items()
            ]
        return echo_json(listing)
    for target in chosen:
        click.echo(target)
    if verbose:
        from lockstep.onnx_tools.show import layer_table

        for (model, precision), path in exported.items():
            table = layer_table(path) if path.is_file() else "not exported yet"
            click.echo(f"\n{model}/{precision}: {table}")


def _layers(path: Path) -> dict[str, Any]:
    from lockstep.artifacts.assembly import Assembly

    if not path.is_file():
        return {"layers": None}
    assembly = Assembly.load(path)
    digests = {name: graph.sha256 for name, graph in assembly.classes.items()}
    for name, variant in assembly.mixers.items():
        digests |= {f"{name}.{phase}": graph.sha256 for phase, graph in variant.phases().items()}
    layers = []
    for layer in assembly.layers:
        for exit in layer.exits or [None]:
            exit_class = exit and exit.graph
            layers.append({"block": layer.block.graph, "attention": layer.variant, "exit": exit_class})
    return {"layers": layers, "sha256": digests}


@click.command()
@click.argument("graph", type=PATH)
def show(graph: Path) -> None:
    """Print the operators, shapes and slots of a graph."""
    from lockstep.onnx_tools.show import show as text

    click.echo(text(graph), nl=False)
