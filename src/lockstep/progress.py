"""Progress on a terminal: an iterable in; a line with the part done, the rate and the time left.

It goes to stderr, or to the terminal of a job whose stderr is its log; without a terminal there is none.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

Item = TypeVar("Item")
_DELAY_S = 2.0  # shorter work has no line
_terminals: list[TextIO] = []  # of jobs; the last counts


@contextlib.contextmanager
def shown_on(descriptor: int) -> Iterator[None]:
    """Show progress on this file, if it is a terminal."""
    with open(descriptor, "w", closefd=False) as stream:
        _terminals.append(stream)
        try:
            yield
        finally:
            _terminals.pop()


def steps(items: Iterable[Item], what: str, unit: str) -> Iterable[Item]:
    """Return the items, whose iteration is shown."""
    stream = [sys.stderr, *_terminals][-1]
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return items
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # of the extra `workflow`
        return items
    tqdm.monitor_interval = 0  # no monitor thread
    shown: Iterable[Item] = tqdm(
        items, what, unit=f" {unit}", file=stream, leave=False, delay=_DELAY_S, dynamic_ncols=True
    )
    return shown
