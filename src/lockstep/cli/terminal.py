"""What commands say: JSON for scripts, colour and progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")


def echo_json(value: Any) -> None:
    """Print one JSON document, keys sorted."""
    from lockstep.artifacts.files import dump_json

    click.echo(dump_json(value), nl=False)


@contextlib.contextmanager
def working(words: str) -> Iterator[None]:
    """Show on stderr that work goes on, for how long by now; nothing where stdout or stderr is no terminal."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:  # an extra: verify, cache and lock do without it
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(words, total=None)
        yield
