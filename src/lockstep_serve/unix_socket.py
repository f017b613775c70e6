"""A Unix socket of mode 0600, which replaces a socket file that no server uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import InputError

_LONGEST = 107  # bytes of sockaddr_un.sun_path, without its zero


@contextlib.contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Bind a socket to `path`; its file is removed when the context ends.

    PATH.lock is held until then: without it, two servers that start at once could remove each other's file. Raises
    InputError where a server listens already, for another kind of file, and for a path that cannot be bound.
    """
    if len(os.fsencode(path)) > _LONGEST:
        raise InputError(f"--unix: expected a path of at most {_LONGEST} bytes, found {path}; choose a shorter one")
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(
            f"--unix: expected a folder that can be written to, found {path.parent}: {error.strerror}"
        ) from None
    try:
        _take(lock, path)
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as end:
            # By umask, not chmod: no other user can connect in between.
            before = os.umask(0o177)
            try:
                end.bind(str(path))
            except OSError as error:
                raise InputError(f"--unix: expected a path to listen at, found {path}: {error.strerror}") from None
            finally:
                os.umask(before)
            try:
                yield end
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _take(lock: int, path: Path) -> None:
    """Hold the lock, and remove what an earlier server left at `path`."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"--unix: expected a path that is free, found {path}: another server has it") from None
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise InputError(f"--unix: expected a path that is free, found another file at {path}; it is left as it is")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise InputError(
                f"--unix: expected a path that is free, found {path}: {error.strerror}; remove it if nobody uses it"
            ) from None
    raise InputError(f"--unix: expected a path that is free, found {path}: a server listens there")
