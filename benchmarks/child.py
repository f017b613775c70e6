"""One command in a process of its own, and what it took.

The numbers are the kernel's own account of the process and its children.

In: a command, a log file, a time limit. Out: exit code, wall and CPU seconds, peak resident memory of its largest
process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """`reason` is None where the command did its work, else one line."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    reason: str | None


def run_child(command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str] | None = None) -> Usage:
    """Run `command`, its output in `log`, and return what it took.

    After `limit` seconds it and its children are killed.

    Linux counts what the starting process holds as the child's until the child's own program is loaded: keep this one
    small.
    """
    began = time.perf_counter()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, stop)
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        timer.cancel()
    seconds, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
    reason = None
    if late.is_set():
        reason = f"not done after {limit:.0f} s"
    elif process.returncode:
        reason = f"exit code {process.returncode}: {_last_line(log)}"
    return Usage(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, reason)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else "nothing printed"
