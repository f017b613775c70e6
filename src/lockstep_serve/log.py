"""The log of both processes: lines with a level on stderr, which are lost if nothing reads them."""

from __future__ import annotations

import functools
import logging
import traceback

log = logging.getLogger("lockstep_serve")
log.addHandler(logging.NullHandler())  # without `start_log` nothing is written
LEVELS = ("debug", "info", "warning", "error")


def start_log(level: str) -> None:
    """Write lines of at least this level to stderr, each as `lockstep: LEVEL: LINE`."""
    logging.raiseExceptions = False  # of a closed stderr
    for name in LEVELS:
        logging.addLevelName(getattr(logging, name.upper()), name)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("lockstep: %(levelname)s: %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(level)


@functools.cache
def log_once(line: str) -> None:
    """Log a line about an accepted but irregular request, once per line; without its contents."""
    log.info(line)


def fault_of(error: BaseException) -> str:
    """Return one line for an unexpected exception, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if frames:
        line += f" ({frames[-1].filename}:{frames[-1].lineno})"
    return line
