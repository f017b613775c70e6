"""The command that generates text: `lockstep generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.cli.guarded import GroupedCommand
from lockstep.cli.opened import SPECULATIVE, TARGET_OR_BUNDLE, runnable, speculative
from lockstep.cli.options import AT_LEAST_1, JSON, PATH, RESULTS
from lockstep.errors import InputError


class _Generate(GroupedCommand):
    groups = {
        "Prompts and answers": "prompt input output max-new-tokens stop adapter",
        "Sampling": "temperature top-k top-p seed",
    }


@click.command(cls=_Generate)
@TARGET_OR_BUNDLE
@click.option("--weights", type=PATH, help="For a bundle without weights: their folder, or a weights.json.")
@click.option("--prompt", help="The text to continue.")
@click.option("--input", "source", type=PATH, help="Or a file of prompts, one JSON record a line.")
@click.option("--output", "out", type=PATH, help="For --input: the file of completions.")
@click.option("--max-new-tokens", type=AT_LEAST_1, default=64)
@click.option("--temperature", type=float, default=0.0, help="0 takes the most likely token.")
@click.option("--top-k", type=int, default=0, help="Draw from this many of the likeliest tokens; 0: from all.")
@click.option(
    "--top-p", type=float, default=1.0, help="Draw from the most likely tokens that make up this probability."
)
@click.option("--seed", type=int, default=0)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given several times.")
@click.option("--adapter", metavar="NAME", help="Compute it with this adapter of the model.")
@click.option("--threads", type=AT_LEAST_1, help="CPU threads.  [default: LOCKSTEP_THREADS, else all]")
@SPECULATIVE
@JSON
@RESULTS
def generate(
    target: str,
    weights: Path | None,
    prompt: str | None,
    source: Path | None,
    out: Path | None,
    max_new_tokens: int,
    stop: tuple[str, ...],
    adapter: str | None,
    threads: int | None,
    drafts: str | None,
    as_json: bool,
    results: Path,
    **sampling: Any,
) -> None:
    """Generate text from a target or a bundle, printed as it is made.

    TARGET: of the last run, such as demo-llama/fp16.

    The speed follows on stderr. With --json, text and speed are one document.

    With --input and --output, a file of prompts is completed, as many at a time as the engines take; run again, it
    resumes. A record: {"prompt": TEXT, "max_tokens": 64, "temperature": 0.8, "seed": 1, ...}.
    """
    from lockstep.runtime import Sampling, command

    # Either a prompt, or both files.
    if (prompt is None) == (source is None) or (source is None) != (out is None):
        named = {"--prompt": prompt, "--input": source, "--output": out}
        actual = " ".join(name for name, value in named.items() if value) or "neither"
        raise InputError(f"generate: expected --prompt, or --input and --output, found {actual}")
    if as_json and prompt is None:
        raise InputError("generate: expected --json with --prompt, found it with --input; its --output is JSON already")
    with runnable(target, weights, results) as place:
        job = command.Job(
            place.engines,
            place.assembly,
            place.weights,
            place.target.layers,
            place.limits,
            max_new_tokens,
            Sampling(**sampling),
            stop,
            threads,
            place.adapters,
            adapter,
            speculative(drafts, results),
        )
        if prompt is not None:
            command.generate(job, prompt, as_json)
        else:
            assert source is not None and out is not None
            command.generate_file(job, source, out)
