"""The command that writes a model repository for NVIDIA's Triton Inference Server: `lockstep triton TARGET OUT`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from lockstep.cli.opened import runnable
from lockstep.cli.stages import RESULTS
from lockstep.errors import CheckError, InputError


@click.command()
@click.argument("target", required=False)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--check", type=click.Path(path_type=Path), metavar="OUT", help="Instead: check a repository.")
@click.option("--socket", type=click.Path(path_type=Path), help="The Unix socket.  [default: OUT/lockstep.sock]")
@click.option("--serve-options", default="", metavar="TEXT", help="More options of `lockstep serve`, in one string.")
@click.option("--max-queue", type=click.IntRange(min=1), default=128, show_default=True, help="max_queue_size.")
@click.option(
    "--decoupled/--not-decoupled", default=True, show_default=True, help="Not: one response a request, no streams."
)
@click.option("--set", "options", multiple=True, metavar="NAME=VALUE", help="A parameter of tensorrt_llm's config.")
@RESULTS
def triton(
    target: str | None,
    out: Path | None,
    check: Path | None,
    socket: Path | None,
    serve_options: str,
    max_queue: int,
    decoupled: bool,
    options: tuple[str, ...],
    results: Path,
) -> None:
    """Write a model repository for NVIDIA's Triton Inference Server, whose models ask `lockstep serve --unix`.

    The first model that Triton loads starts that server; paths in the repository are this machine's."""
    try:
        from lockstep.serve.triton_repository.lint import check_repository
        from lockstep.serve.triton_repository.write import Repository, write_repository
    except ModuleNotFoundError as error:
        raise InputError(
            f"triton: needs the Python package {error.name!r}, which is not installed here; install lockstep[serve]"
        ) from None
    if (check is None) == (target is None) or (target is None) != (out is None):
        raise InputError("triton: expected TARGET and OUT, or --check OUT")
    if check is not None:
        if faults := check_repository(check):
            for fault in faults[1:]:
                click.echo(fault, err=True)
            raise CheckError(faults[0])
        return click.echo(f"{check}: no fault found")
    assert out is not None
    with runnable("triton", "TARGET", target, None, None, results) as found:
        max_batch_size = found.place.limits.max_batch_size
    folder = out.absolute()
    place = (socket or folder / "lockstep.sock").absolute()
    command = [sys.executable, "-m", "lockstep", "serve", str(target), "--results", str(results.absolute())]
    command += ["--unix", str(place), "--triton-repository", str(folder), *shlex.split(serve_options)]
    pairs = dict(each.partition("=")[::2] for each in options)
    write_repository(Repository(command, place, max_batch_size, max_queue, decoupled, pairs), folder)
    if faults := check_repository(folder):
        raise InputError(faults[0])
    click.echo(folder)
