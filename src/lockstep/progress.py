"""Progress on a terminal: what is iterated in; a line with how much is done, the rate and what remains.

It goes to stderr, or to the terminal of a job whose stderr is its log; where neither is a terminal there is none.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

Item = TypeVar("Item")
_DELAY_S = 2.0  # work that is done before has no line
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
    stream = _terminals[-1] if _terminals else sys.stderr
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return items
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # of the extra `workflow`
        return items
    tqdm.monitor_interval = 0  # no thread of its own
    shown: Iterable[Item] = tqdm(
        items, what, unit=f" {unit}", file=stream, leave=False, delay=_DELAY_S, dynamic_ncols=True
    )
    return shown
