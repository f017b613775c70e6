"""A cache of file digests, and checks of files against recorded digests.

A path and its digest in; nothing out, or an error that names the file. Small files are hashed each time. A large one is
hashed once: its digest is kept with its size and times in the user's cache, and is valid while these do not change.
`deep` hashes in any case. The cache only saves time, and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts import formats
from lockstep.artifacts.files import check_file, read_json, sha256_file, sha256_json, write_json
from lockstep.artifacts.places import StoredFile
from lockstep.errors import InputError

LARGE = 16 << 20  # bytes, hashed in about 10 ms: for smaller files a cache would save no noticeable time
THREADS = min(8, os.cpu_count() or 1)
_stamps: dict[str, tuple[dict[str, int], str]] = {}  # {path: state and stamp} of files that this process never hashes


@dataclass(frozen=True)
class Expected:
    """A file with the sha256 and the size in bytes that a manifest records; None where it records no size."""

    path: Path
    sha256: str
    size: int | None = None


def digest(path: str | os.PathLike, deep: bool = False) -> str:
    """Return the hex sha256 of a file. A large file that has not changed since it was hashed is not read.

    Raises FileNotFoundError, and InputError for a path that is no regular file.
    """
    path = os.path.realpath(path)
    before = _state(path)
    if before["size"] < LARGE:
        return sha256_file(path)
    if not deep and (record := _recall(path, before)):
        return record
    sha256 = sha256_file(path)
    # A file that was written to meanwhile is hashed again by the next reader.
    if _state(path) == before:
        _keep(path, before, sha256)
    return sha256


def stamp(path: str | os.PathLike) -> str:
    """Return a digest of a file's size, inode and times, which `check_files` takes for the file's while these stay."""
    path = os.path.realpath(path)
    state = _state(path)
    sha256 = sha256_json(state)
    _stamps[path] = state, sha256
    return sha256


def remember(path: str | os.PathLike, sha256: str) -> None:
    """Keep the digest of a file that this process has just written or hashed, so that no reader need hash it."""
    path = os.path.realpath(path)
    state = _state(path)
    if state["size"] >= LARGE:
        _keep(path, state, sha256)


def check_files(files: Iterable[Expected], remedy: str) -> None:
    """Raise InputError, with `remedy`, for the first file that is absent or of another size or digest."""
    files = list(files)
    for file in files:
        check_size(file.path, file.size, remedy)
    files = [file for file in files if not _is_stamped(file)]
    with ThreadPoolExecutor(THREADS) as pool:  # hashlib releases the interpreter's lock
        digests = list(pool.map(lambda file: digest(file.path), files))
    for file, sha256 in zip(files, digests):
        if sha256 != file.sha256:
            raise InputError(
                f"{file.path}: expected sha256 {file.sha256}, found {sha256}: the file has "
                f"changed; restore it or {remedy}"
            )


def _is_stamped(file: Expected) -> bool:
    path = os.path.realpath(file.path)
    return path in _stamps and _stamps[path] == (_state(path), file.sha256)


def check_stored(files: Iterable[StoredFile], folder: Path, remedy: str) -> None:
    """Check the files of a manifest, whose paths are relative to `folder`, as `check_files`."""
    check_files([Expected(folder / file.path, file.sha256, file.size) for file in files], remedy)


def check_size(path: Path, size: int | None, remedy: str) -> None:
    """Raise InputError when the file `path` is absent or not of `size` bytes."""
    try:
        actual_size = check_file(path).st_size
    except FileNotFoundError:
        expected = "a file" if size is None else f"a file of {size} bytes"
        raise InputError(f"{path}: expected {expected}, found none; restore it or {remedy}") from None
    if size is not None and actual_size != size:
        raise InputError(
            f"{path}: expected {size} bytes, found {actual_size}: the file has changed; restore it or {remedy}"
        )


def size_of(path: str | os.PathLike) -> int | None:
    try:
        return check_file(path).st_size
    except (FileNotFoundError, InputError):
        return None


def _state(path: str) -> dict[str, int]:
    """Return size, inode and times of a file, one of which changes with its content."""
    # Two times, for a program may set back that of the content (mtime), but not that of the inode (ctime).
    stat = check_file(path)
    return {"size": stat.st_size, "inode": stat.st_ino, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def user_cache(*parts: str) -> Path:
    """Return a path in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "lockstep", *parts)


def _entry_path(path: str) -> Path:
    return user_cache("seen", f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json")


def _recall(path: str, state: dict[str, int]) -> str | None:
    try:
        entry = read_json(_entry_path(path), formats.SEEN)
    except (InputError, OSError):
        return None  # no entry yet, or a damaged one: the file is hashed again
    # The name of an entry is a digest of the path, so the entry says which path it is of.
    if entry.get("path") != path or entry.get("state") != state:
        return None
    return entry["sha256"]


def _keep(path: str, state: dict[str, int], sha256: str) -> None:
    try:
        write_json(_entry_path(path), {"format": formats.SEEN, "path": path, "state": state, "sha256": sha256})
    except (InputError, OSError, UnicodeError):
        pass  # no home, a full disk: it is hashed again next time
