"""The command that merges an adapter into its model's checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.options import PATH, RESULTS
from lockstep.cli.terminal import working
from lockstep.targets import Results


@click.command()
@click.argument("model")
@click.argument("adapter")
@click.option("--out", type=PATH, required=True, help="The new checkpoint's folder.")
@RESULTS
def merge(model: str, adapter: str, out: Path, results: Path) -> None:
    """Write a model's checkpoint with an adapter merged into it."""
    from lockstep.artifacts.checkpoint import CheckpointManifest

    tree = Results(results)
    checkpoint = tree.checkpoint(model)
    config = CheckpointManifest.load(checkpoint).config
    from lockstep.export.lora import transposed_layers  # loads torch
    from lockstep.weights.merge import merge as merge_adapter

    with working(f"merging adapter {adapter!r}"):
        transposed = transposed_layers(config)
        click.echo(merge_adapter(checkpoint, tree.adapters(model), adapter, out, transposed))
