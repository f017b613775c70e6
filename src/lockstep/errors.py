"""The errors that a user sees: one line each, and the exit code that goes with it."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

PREFIX = "lockstep: error: "
_ENVIRONMENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EIO}


class LockstepError(Exception):
    """Base of all errors meant for a user. The message is one line: what was expected, what was found, where, what to do."""

    exit_code = 1


class InputError(LockstepError):
    """A mistake in what the user gave: config, checkpoint, prompt, disk. Exit code 2."""

    exit_code = 2


class CheckError(LockstepError):
    """A result that is not right: over tolerance, other tokens, an engine made for another machine. Exit code 1."""


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Where folders are removed: CPython's rmtree, interrupted while it closes one, closes it again, and fails. Raises KeyboardInterrupt then."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Turn a user's errors into one line on stderr and an exit code; a programming error keeps its traceback."""
    try:
        with interrupts():
            yield
    except LockstepError as error:
        _leave(" ".join(str(error).split()), error.exit_code)
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRNOS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _leave(f"{error.strerror}{where}: free or make writable this place and run the same command again", 2)
    except KeyboardInterrupt:
        _leave("interrupted; finished results are kept, run the same command to go on", 130)


def _leave(line: str, exit_code: int) -> None:
    print(f"{PREFIX}{line}", file=sys.stderr)
    raise SystemExit(exit_code)
