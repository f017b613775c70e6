"""A command in a process of its own, which is not left behind.

Interrupted, this process ends it first.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.errors import Ended

# Seconds in which a child that was told to end undoes what it began; one that computes outside of Python hears of it
# late.
GRACE = 10.0


def run(command: Sequence[str], input: str | None = None, **options: Any) -> subprocess.CompletedProcess:
    """Run `command` as `subprocess.run(text=True)` does, with options of Popen.

    On SIGTERM and SIGHUP the child gets the same signal. On Ctrl-C a terminal has told it already; else it gets SIGTERM
    after `GRACE` seconds. One that does not end is killed. Raises OSError for a command that does not start.
    """
    if input is not None:
        options["stdin"] = subprocess.PIPE
    process = subprocess.Popen(command, text=True, **options)
    try:
        output, errors = process.communicate(input)
    except BaseException as error:
        _end(process, error)
        # 128 and a signal: the child was a `guard` too, and has said on our stderr what ended it.
        said = options.get("stderr") is None and process.returncode > 128
        error.said_by_child = said  # type: ignore[attr-defined]  # any exception takes attributes; `guard` reads this
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def environment() -> dict[str, str]:
    """Return the environment of a process of this interpreter, which finds there what it finds here.

    The working directory is none of the places, for a user's types.py may lie there (from Python 3.11 on).
    """
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}


def freeze_heap() -> None:
    """Keep what this process holds by now out of garbage collections.

    As vLLM does. A server's processes hold some 70,000 objects once they are ready. A full collection walks them for
    20 ms or more, during which no token goes out.
    """
    gc.collect()
    gc.freeze()


def _end(process: subprocess.Popen, error: BaseException) -> None:
    try:
        if isinstance(error, Ended):
            process.send_signal(error.number)
        for tell in (process.terminate, process.kill):
            try:
                process.communicate(timeout=GRACE)
                return
            except subprocess.TimeoutExpired:
                tell()
    finally:
        process.kill()  # nothing, where it has ended
        process.wait()
