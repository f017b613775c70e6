"""The output of commands: JSON for scripts, progress on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click


def echo_json(value: Any) -> None:
    from lockstep.artifacts.files import dump_json

    click.echo(dump_json(value), nl=False)


def file_json(path: Path) -> dict[str, Any]:
    from lockstep.artifacts.files import sha256_file

    return {"path": str(path), "sha256": sha256_file(path), "size": path.stat().st_size}


@contextlib.contextmanager
def working(words: str) -> Iterator[None]:
    """Show a spinner and the elapsed time on stderr; without a terminal nothing."""
    # If stdout is a pipe or a file, a script is reading, and progress on stderr would clutter its log.
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:  # an extra, which verify and lock do not need
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(words, total=None)
        yield
