"""Child processes, which are ended where this process is interrupted, and settings of this one's Python."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.errors import Ended

# Seconds for a child to clean up after a signal: native code returns to Python, which handles it, only later.
GRACE = 10.0


def run(command: Sequence[str], input: str | None = None, **options: Any) -> subprocess.CompletedProcess:
    """Run `command` as `subprocess.run(text=True)` does, with options of Popen.

    On SIGTERM and SIGHUP the child gets the same signal. Ctrl-C on a terminal reaches it without us; else it gets
    SIGTERM after `GRACE` seconds. One that does not end is killed. Raises OSError for a command that does not start.
    """
    if input is not None:
        options["stdin"] = subprocess.PIPE
    process = subprocess.Popen(command, text=True, **options)
    try:
        output, errors = process.communicate(input)
    except BaseException as error:
        _end(process, error)
        # 128 and a signal: the child ran in a `guard` too, which has written the same line to our stderr.
        is_reported = options.get("stderr") is None and process.returncode > 128
        error.is_reported = is_reported  # type: ignore[attr-defined]  # any exception takes attributes
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def environment() -> dict[str, str]:
    """Return the environment for a child process of this interpreter, with the same import path.

    Without the working directory (from Python 3.11 on): a user's types.py there would hide Python's.
    """
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}


def freeze_heap() -> None:
    """Exempt all current objects from garbage collections, as vLLM does.

    A server's processes hold some 70,000 objects once they are ready. A full collection walks them for 20 ms or more,
    during which no token is sent.
    """
    # Collect first: frozen garbage would never be freed.
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no garbage in the `with` block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def share_interpreter() -> None:
    """Let a thread wait for the Python of another one for 0.5 ms at most, not 5 ms: a long prompt stops no stream."""
    sys.setswitchinterval(0.0005)


def _end(process: subprocess.Popen, error: BaseException) -> None:
    try:
        if isinstance(error, Ended):
            process.send_signal(error.number)
        for stronger_signal in (process.terminate, process.kill):
            try:
                process.communicate(timeout=GRACE)
                return
            except subprocess.TimeoutExpired:
                stronger_signal()
    finally:
        process.kill()  # does nothing to a process that has ended
        process.wait()
