"""The command that finds where a target goes wrong: `lockstep bisect TARGET`."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.opened import TARGET, of_last_run, used_config
from lockstep.cli.options import AT_LEAST_1, JSON, PATH, RESULTS
from lockstep.cli.terminal import echo_json, working
from lockstep.targets import Results


@click.command()
@TARGET
@click.option("--prompt", help="The text to follow.  [default: the first golden prompt that fails, else the longest]")
@click.option("--save-inputs", type=PATH, help="Write what an engine that is off reads, for `polygraphy debug`.")
@JSON
@click.option("--threads", type=AT_LEAST_1, help="CPU threads.  [default: all]")
@RESULTS
def bisect(
    target: str, prompt: str | None, save_inputs: Path | None, as_json: bool, threads: int | None, results: Path
) -> None:
    """Find where a target goes wrong.

    Its engines are compared with its graphs, and these with PyTorch.
    """
    tree = Results(results)
    config = used_config(tree)
    chosen = config.parse_target(target, of_last_run(tree))
    # These imports load PyTorch, which takes seconds: a mistyped target fails before.
    from lockstep.verify.bisect.report import text
    from lockstep.verify.bisect.run import bisect as bisect_target

    tolerance = config.tolerance(chosen.model, chosen.precision, chosen.backend)
    with working(f"bisect {chosen}"):
        report = bisect_target(tree, chosen, tolerance, prompt, threads, inputs=save_inputs)
    if as_json:
        return echo_json(report.to_json())
    click.echo(text(report), nl=False)
