"""The command that packs a target into one file: `lockstep bundle TARGET`."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.opened import TARGET, made_target, used_config
from lockstep.cli.stages import RESULTS
from lockstep.cli.terminal import JSON, echo_json, file_json
from lockstep.targets import Results


@click.command()
@TARGET
@click.option("--weights", is_flag=True, help="Pack the weights too.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write.  [default: MODEL-PRECISION-LAYERS-BACKEND.tar]",
)
@JSON
@RESULTS
def bundle(target: str, weights: bool, out: Path | None, as_json: bool, results: Path) -> None:
    """Pack a target into one file, which runs where its backend is installed."""
    from lockstep.bundle.pack import pack

    tree = Results(results)
    config = used_config(tree)
    chosen = made_target(config, tree, target)
    name = f"{chosen}".replace("/", "-") + ".tar"
    path = pack(tree, chosen, config.limits.plain(), out or Path(name), weights)
    if as_json:
        return echo_json({"target": str(chosen), "weights": weights, **file_json(path)})
    click.echo(path)
