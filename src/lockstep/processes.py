"""A command in a process of its own, which is not left behind.

Interrupted, this process ends it first.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import Ended

_PACKAGE = Path(__file__).resolve().parent
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


def environment(python: str | None, *packages: Path) -> dict[str, str]:
    """Return the environment of a process in `python` (None: this interpreter), which finds this package.

    This interpreter finds there what it finds here. Another one has packages of its own: of these it gets this one, and
    `packages`. The working directory is none of the places, for a user's types.py may lie there (from Python 3.11 on).
    """
    is_this = python in (None, sys.executable)
    paths = [path for path in sys.path if path] if is_this else [_import_folder(each) for each in (_PACKAGE, *packages)]
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


@functools.cache
def _import_folder(package: Path) -> str:
    """Return a folder for PYTHONPATH by which another interpreter finds a package of this one, and nothing else.

    That is the package's own folder where it lies there alone, as in a checkout; of site-packages, whose other packages
    are built for this interpreter, a folder with a link to it, which goes when this process ends.
    """
    others = (path for path in package.parent.iterdir() if path.suffix == ".dist-info")
    if next(others, None) is None:
        return str(package.parent)
    folder = tempfile.mkdtemp(prefix="lockstep-package-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, package.name).symlink_to(package)
    return folder
