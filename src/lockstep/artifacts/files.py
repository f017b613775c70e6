"""Files written whole or not at all, canonical JSON, and digests."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

# The key of a manifest that holds the sha256 of its other entries, so that every reader detects a flipped byte.
DIGEST_KEY = "entries_sha256"
_EARLIER_KEY = "sealed_sha256"  # its name until 0.3
ABSENT = "run `lockstep run` first"
DAMAGED = "correct the path, or delete the file and run again"
OTHER_VERSION = "another version of Lockstep wrote it: `lockstep run` makes it again"


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike, writer: str | None = None) -> Iterator[Path]:
    """Yield a temporary path, which becomes `path` on success and is removed otherwise.

    It is in the folder of `path`: a rename is atomic within one file system only. writer: distinguishes this writer's
    temporary file from others'; by default the process number, which is enough on one machine. Raises InputError where
    no file could be written, as `check_place`.
    """
    path = Path(path)
    check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{writer or os.getpid()}.tmp")
    try:
        yield temporary
        # To disk before the rename: else a power cut may leave the new name with no content.
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_room(expected: str) -> Iterator[None]:
    """Raise InputError, which opens with `expected`, where the disk or a quota is full: an OSError names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise InputError(f"{expected}, found the disk full ({error.strerror}); free space and run again") from None


def check_place(path: Path) -> None:
    """Raise InputError where a file could not be written to `path`."""
    if path.is_dir():
        raise InputError(
            f"{path}: expected to write a file here, found a folder; remove or rename it, or choose another place"
        )
    # Renaming would replace it by a file: with root's rights, even /dev/null.
    if path.is_char_device() or path.is_block_device():
        raise InputError(f"{path}: expected to write a file here, found a device; choose another place")
    above = next((folder for folder in path.parents if folder.exists()), None)
    if above is not None and not above.is_dir():
        raise InputError(
            f"{above}: expected a folder to write into, found a file; remove or rename it, or choose another place"
        )


def check_writable(folder: str | os.PathLike, remedy: str) -> None:
    """Raise InputError for a folder in which this user can make no file. remedy: what to do then."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{os.path.abspath(folder)}: expected a folder that can be written to, found one that this user cannot "
            f"write to; {remedy}"
        )


def remove_leftovers(path: str | os.PathLike) -> None:
    """Remove the temporary files for `path` of processes that were killed.

    Only where one machine at a time writes `path`: another machine's process would look dead here.
    """
    path = Path(path)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = leftover.name.removeprefix(f".{path.name}.").removesuffix(".tmp")
        if pid.isdecimal() and not _is_alive(int(pid)):
            leftover.unlink(missing_ok=True)


def recorded_folder(source: str, folder: Path, out: Path) -> str:
    """Return the path of a source's folder as the manifest `out` records it: relative to it where the source is."""
    if os.path.isabs(source):
        return os.path.abspath(folder)
    # Real paths, because `..` after a linked folder leads to the parent of the link's target.
    return Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(out.parent))).as_posix()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        pass
    return True


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def dump_json(value: Any) -> str:
    """Return canonical JSON: sorted keys, two spaces, a newline at the end; no NaN or infinity."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write canonical JSON, whole or not at all; a manifest (an object with a "format") with its digest."""
    data = dump_json(value).encode()
    if isinstance(value, dict) and "format" in value:
        data = manifest_bytes(value)
    write_bytes(path, data)


def manifest_bytes(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest: `value` with its digest, as canonical JSON."""
    value = {key: item for key, item in value.items() if key != DIGEST_KEY}
    return dump_json({**value, DIGEST_KEY: sha256_json(value)}).encode()


def read_json(path: str | os.PathLike, format: str | None = None, absent: str = ABSENT, damaged: str = DAMAGED) -> Any:
    """Read JSON, of a manifest without its digest.

    format: the expected value of its "format" key. absent, damaged: the remedy for a missing and for an invalid file.
    Raises InputError when the file is absent, is not JSON, has another format, or does not have its digest.
    """
    file_format = digest = content_digest = None
    try:
        check_file(path)
        data = Path(path).read_bytes()
        # Python reads NaN and Infinity as JSON; our own documents have none, other programs' files may.
        refuse = _refuse_constant if format else None
        value = json.loads(data, parse_constant=refuse)
        if isinstance(value, dict):
            file_format = value.get("format")
        if isinstance(file_format, str):
            digest = value.pop(DIGEST_KEY, value.pop(_EARLIER_KEY, None))
        if digest is not None:  # a manifest that a user wrote has none
            content_digest = _digest_of(data, value, digest)  # a ValueError for half a character (a lone surrogate)
    except FileNotFoundError:
        raise InputError(f"{path}: expected a file, found none; {absent}") from None
    except RecursionError:
        raise InputError(f"{path}: expected JSON, found lists or objects nested too deeply; {damaged}") from None
    except ValueError as error:  # numbers of thousands of digits and text that is no Unicode are no JSONDecodeError
        raise InputError(f"{path}: expected JSON, found {' '.join(str(error).split())}; {damaged}") from None
    if format is not None and file_format != format:
        other_version = isinstance(file_format, str) and file_format.partition("/")[0] == format.partition("/")[0]
        if other_version and damaged == DAMAGED:
            damaged = f"{OTHER_VERSION}, or delete it where no target needs it"
        raise InputError(f"{path}: expected format {format!r}, found {file_format!r}; {damaged}")
    if digest != content_digest:
        raise InputError(
            f"{path}: expected content of sha256 {digest}, found {content_digest}: the file is damaged; {damaged}"
        )
    return value


def has_digest(data: bytes) -> bool:
    """Return whether a document has a digest of its other entries."""
    return any(f'"{key}"'.encode() in data for key in (DIGEST_KEY, _EARLIER_KEY))


def _digest_of(data: bytes, value: Any, expected: Any) -> str:
    """Return the sha256 of a manifest's content. data: the file. value: its JSON without the digest."""
    # A file that nobody edited is canonical but for the line of its digest. Hashing its bytes without that line is much
    # faster than writing `value` as canonical JSON, which decides only where the bytes differ.
    line = f',\n  "{DIGEST_KEY}": "{expected}"'.encode(errors="replace")
    digest = hashlib.sha256(data.replace(line, b"", 1)).hexdigest()
    if digest == expected:
        return digest
    return sha256_json(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is no JSON")


def check_file(path: str | os.PathLike) -> os.stat_result:
    """Return the `os.stat` of a regular file. Raises InputError for anything else: reading a pipe would block."""
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return status
    except (OSError, ValueError) as error:
        # A missing file and denied access are left to the caller, who knows what the file is for.
        if isinstance(error, OSError) and error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise
    raise InputError(f"{path}: expected a file, found {describe(path)}; correct the path, or remove it and run again")


def describe(path: str | os.PathLike) -> str:
    """Return in words the kind of file at `path`: "a folder", "links in a circle", "nothing"."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "nothing"
        if error.errno == errno.ELOOP:
            return "links in a circle"
        return str(error.strerror).lower()
    except ValueError:  # a name with a zero byte
        return "a name that no file can have"
    if stat.S_ISREG(mode):
        return "a file"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a device, pipe or socket"


def sha256_file(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        if hasattr(hashlib, "file_digest"):  # Python 3.11; the runtime supports 3.10 too
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def sha256_json(value: Any) -> str:
    return hashlib.sha256(dump_json(value).encode()).hexdigest()
