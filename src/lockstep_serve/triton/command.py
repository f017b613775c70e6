"""The command that writes a model repository for NVIDIA's Triton Inference Server: `lockstep triton`."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

import click

from lockstep.cli.opened import BUNDLE_SUFFIX, runnable
from lockstep.cli.options import AT_LEAST_1, JSON, PATH, RESULTS
from lockstep.cli.terminal import echo_json
from lockstep.errors import CheckError, InputError
from lockstep_serve.settings import ServiceLimits


@click.command()
@click.argument("target", required=False, metavar="TARGET|BUNDLE.tar")
@click.argument("out", required=False, type=PATH)
@click.option("--check", type=PATH, metavar="OUT", help="Instead: check a repository.")
@click.option("--socket", type=PATH, help="The Unix socket.  [default: OUT/lockstep.sock]")
@click.option(
    "--serve-options",
    default="",
    show_default=False,
    metavar="TEXT",
    help="More options of `lockstep serve`, in one string.",
)
@click.option("--max-queue", type=AT_LEAST_1, default=ServiceLimits.max_queue, help="max_queue_size.")
@click.option("--decoupled/--not-decoupled", default=True, help="Not: one response a request, no streams.")
@click.option("--set", "options", multiple=True, metavar="NAME=VALUE", help="A key of fill_template.py.")
@JSON
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
    as_json: bool,
    results: Path,
) -> None:
    """Write a model repository for NVIDIA's Triton Inference Server.

    Its models ask `lockstep serve --unix`. The first model that Triton loads starts that server; paths in the
    repository are this machine's.
    """
    from lockstep_serve.triton.repository.lint import check_repository
    from lockstep_serve.triton.repository.options import template_values
    from lockstep_serve.triton.repository.write import Repository, write_repository

    if (check is None) == (target is None) or (target is None) != (out is None):
        raise InputError("triton: expected TARGET and OUT, or --check OUT")
    if check is not None:
        faults = check_repository(check)
        if as_json:
            echo_json({"repository": str(check), "faults": faults})
        elif not faults:
            click.echo(f"{check}: no fault found")
        if faults:
            for fault in faults[1:]:
                click.echo(fault, err=True)
            raise CheckError(faults[0])
        return
    assert target is not None and out is not None
    # Opening it also reports a target that cannot be served now, not when Triton starts.
    with runnable(target, None, results) as opened:
        max_batch_size = opened.limits.max_batch_size
    # Triton starts the command from another working folder.
    served = os.path.abspath(target) if target.endswith(BUNDLE_SUFFIX) else target
    folder = out.absolute()
    socket_path = (socket or folder / "lockstep.sock").absolute()
    command = [sys.executable, "-m", "lockstep", "serve", served, "--results", str(results.absolute())]
    command += ["--unix", str(socket_path), "--triton-repository", str(folder), *shlex.split(serve_options)]
    parameters, settings = template_values(options, max_batch_size)
    settings = {"max_queue": max_queue, "decoupled": decoupled, **settings, "options": parameters}
    repository = Repository(command, socket_path, max_batch_size, **settings)
    # Write elsewhere first, so that an invalid repository is never written to OUT.
    with tempfile.TemporaryDirectory() as trial:
        write_repository(repository, Path(trial))
        if faults := check_repository(Path(trial)):
            raise InputError(faults[0].replace(trial, str(folder)))
    write_repository(repository, folder)
    if as_json:
        return echo_json({"repository": str(folder), "faults": []})
    click.echo(folder)
