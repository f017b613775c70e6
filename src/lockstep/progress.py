"""Progress on a terminal: an iterable in; a line with the part done, the rate and the time left.

It goes to stderr, or to the terminal of a job whose stderr is its log; without a terminal there is none.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")
_DELAY_S = 2.0  # shorter work has no line
_terminals: list[TextIO] = []  # of `shown_on`; the last one is used


@contextlib.contextmanager
def shown_on(descriptor: int) -> Iterator[None]:
    """Show progress on this file, if it is a terminal."""
    with open(descriptor, "w", closefd=False) as stream:
        _terminals.append(stream)
        try:
            yield
        finally:
            _terminals.pop()


def steps(items: Iterable[Item], what: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """Return the items, whose iteration is shown. total: how many there are, where `len` does not say it."""
    if bar := _bar(what, unit, items, total):
        return bar
    return items


@contextlib.contextmanager
def counted(total: int, what: str, unit: str) -> Iterator[Callable[[int], object]]:
    """Show work that is no iteration. Yields a function, to be called with the number of units that are done."""
    bar = _bar(what, unit, None, total)
    if bar is None:
        yield lambda units: None
        return
    with bar:
        yield bar.update


def _bar(what: str, unit: str, items: Iterable[Any] | None, total: int | None) -> Any:
    """Return a line of tqdm; None without a terminal."""
    stream = [sys.stderr, *_terminals][-1]
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # of the extra `workflow`
        return None
    tqdm.monitor_interval = 0  # no monitor thread
    options = {"unit": f" {unit}", "file": stream, "leave": False, "delay": _DELAY_S, "dynamic_ncols": True}
    return tqdm(items, what, total, **options)
