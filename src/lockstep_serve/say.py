"""Lines on stderr that never block or fail: if nothing reads them, they are lost."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback


def say(line: str) -> None:
    """Print a line to stderr, if possible."""
    with contextlib.suppress(OSError, ValueError):  # the latter from a closed stderr
        print(f"lockstep: {line}", file=sys.stderr, flush=True)


@functools.cache
def say_once(line: str) -> None:
    """Print a line about a request that is accepted though not quite right, the first time; without its contents."""
    say(line)


def fault_of(error: BaseException) -> str:
    """Return one line for an unexpected exception: what, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
