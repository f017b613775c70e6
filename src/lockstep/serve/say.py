"""Lines on stderr that never stop whoever says them: if none reads, they are lost."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback


def say(line: str) -> None:
    """Print a line to stderr, if that can be."""
    with contextlib.suppress(OSError, ValueError):  # the latter of a stderr that is closed
        print(f"lockstep: {line}", file=sys.stderr, flush=True)


@functools.cache
def say_once(line: str) -> None:
    """Print a line that holds nothing of a request: what is taken though it is not quite right."""
    say(line)


def fault_of(error: BaseException) -> str:
    """Return one line of an exception that nobody expected: what, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
