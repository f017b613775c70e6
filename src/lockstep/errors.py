"""The errors that a user sees: one line each, and the exit code that goes with it."""

from __future__ import annotations

import codecs
import contextlib
import errno
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PREFIX = "lockstep: error: "
NOTE = "lockstep: note: "
_LONGEST_LIST = 20
_LONGEST_QUOTE = 120  # characters of a user's file in a message
_TAIL = 60  # characters that show where a name is no UTF-8
_RESEND_S = 0.02  # after which a signal is sent again
# By these a scheduler, a service manager, `kill` and a closed terminal end a process.
ENDING = (signal.SIGTERM, signal.SIGHUP)
# {error of the user's machine, not of this program: what to do}.
_ENVIRONMENT_ERRNOS = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EIO),
    "free space or make the place writable",
) | {errno.ENAMETOOLONG: "take a shorter one"}


def truncate_list(names: Sequence[str], between: str = ", ") -> str:
    """Return names for a message: all of them, or of a long list the first three and their number."""
    if len(names) > _LONGEST_LIST:
        names = [*names[:3], f"... ({len(names)} in all)"]
    return between.join(names)


def truncate(text: str) -> str:
    """Return a text that a message quotes, cut where it is long."""
    if len(text) <= _LONGEST_QUOTE:
        return text
    return f"{text[: _LONGEST_QUOTE - 3]}..."


def pip_install(extra: str) -> str:
    """Return how to install an extra: from a clone, as a package of this name on an index may be anybody's."""
    return f'pip install ".[{extra}]" in a clone of this project'


def is_installed(module: str) -> bool:
    """Return whether a module can be imported by this Python; it is not loaded."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
    except ValueError:  # it is imported, and has no file
        return True


def note(line: str) -> None:
    """Write a note for the user to stderr: a decision that is no error."""
    print(f"{NOTE}{line}", file=sys.stderr, flush=True)


class LockstepError(Exception):
    """The base of all errors meant for a user. The message is one line: expected, found, where, and the remedy."""

    exit_code = 1


class InputError(LockstepError):
    """A mistake in the user's input: config, checkpoint, prompt, disk. Exit code 2."""

    exit_code = 2


class CheckError(LockstepError):
    """A wrong result: over tolerance, other tokens, an engine made for another machine. Exit code 1."""


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP, as an interrupt: all code that cleans up on Ctrl-C then does so here too."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def _ending_raises() -> Iterator[None]:
    """Raise Ended where a signal of `ENDING` would end this process; ignored (`nohup`) or handled ones stay so."""
    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    unhandled = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: Any) -> None:
        for other in unhandled:
            signal.signal(other, signal.SIG_IGN)  # a second signal would interrupt the cleanup
        raise Ended(number)

    def handle() -> None:
        for number in unhandled:
            signal.signal(number, end)

    handle()
    try:
        with _repeats_ignored(handle):
            yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _repeats_ignored(handle: Callable[[], None]) -> Iterator[None]:
    """Send a signal once more whose interrupt Python has ignored.

    It ignores errors of destructors and of weak references' callbacks; imports run many. handle: sets the handlers of
    `ENDING` again.
    """
    before = sys.unraisablehook

    def hook(ignored: Any) -> None:
        error = ignored.exc_value
        if not isinstance(error, KeyboardInterrupt):
            return before(ignored)
        handle()
        number = getattr(error, "number", signal.SIGINT)
        timer = threading.Timer(_RESEND_S, os.kill, (os.getpid(), number))  # after this hook has returned
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that an error was caused by, if it was by one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt where another error hides it.

    CPython's rmtree, interrupted while it closes a folder, closes it again, and fails with OSError. A class statement
    that is interrupted fails with RuntimeError.
    """
    try:
        yield
    except Exception as error:
        interrupt = _interrupt_of(error)
        if interrupt is None:
            raise
        raise interrupt from None


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Turn a user's errors into one line on stderr and an exit code.

    A programming error keeps its traceback. An interrupt, SIGTERM and SIGHUP are one line too, after all cleanup; the
    exit code is 128 and the signal's number. Characters that stdout's encoding lacks are escaped.
    """
    # Only a TextIOWrapper can be reconfigured; tests and notebooks may replace stdout.
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors=_ESCAPES)
    try:
        with _ending_raises(), interrupts():
            yield
    except LockstepError as error:
        _leave(" ".join(str(error).split()), error.exit_code)
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRNOS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _leave(f"{error.strerror}{where}: {_ENVIRONMENT_ERRNOS[error.errno]} and run the same command again", 2)
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":
            raise
        name = error.object[: error.end][-_TAIL:].encode(errors="backslashreplace").decode().strip()
        _leave(f"expected a name in UTF-8, found other bytes at the end of {name}; rename it and run again", 2)
    except KeyboardInterrupt as error:
        event = INTERRUPTED
        number = signal.SIGINT.value
        if isinstance(error, Ended):
            event = f"ended by {error}"
            number = error.number
        if getattr(error, "is_reported", False):  # a child process has written the same line to stderr
            raise SystemExit(128 + number) from None
        _leave(f"{event}; {KEPT}", 128 + number)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Escape characters that stdout cannot encode as JSON does, so that a JSON document stays one."""
    import json  # little is imported before the guard

    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


_ESCAPES = "lockstep.escapes"
codecs.register_error(_ESCAPES, _escaped)
INTERRUPTED = "interrupted"
KEPT = "finished results are kept, run the same command to go on"


def _leave(line: str, exit_code: int) -> None:
    print(f"{PREFIX}{line}", file=sys.stderr)
    raise SystemExit(exit_code)
