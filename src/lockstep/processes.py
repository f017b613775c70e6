"""A command in a process of its own, which is not left behind.

Interrupted, this process ends it first.
"""

from __future__ import annotations

import subprocess
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
