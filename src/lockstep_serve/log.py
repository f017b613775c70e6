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
    """Log that a request is accepted though not quite right, the first time; without its contents."""
    log.info(line)


def fault_of(error: BaseException) -> str:
    """Return one line for an unexpected exception: what, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
