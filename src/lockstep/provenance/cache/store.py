"""The folder of a cache: blobs by their sha256, entries by their build key.

Files in, verified copies out; only the standard library.

Files are written to a temporary name in the same folder, flushed and renamed, so that others see them whole or not at
all. Names of temporary files are random: process ids of two machines may be equal. What is found damaged is deleted
where that is possible, and never used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import Digest
from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.document import Bound, JsonObject, ValidationError
from lockstep.artifacts.files import atomic_path, read_json, sha256_file, write_json
from lockstep.errors import InputError

VARIABLE = "LOCKSTEP_CACHE"
DIGEST = re.compile("[0-9a-f]{64}")
_LARGEST_ENTRY = 16 << 20  # bytes; an entry of a thousand files has a tenth of a megabyte
_CHUNK = 256 << 20  # of a copy in the kernel: a file that is being written stays young
# A file system, or a pair of them, in which the kernel does not copy.
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


@dataclass(frozen=True)
class Blob:
    """The content of a file: hex sha256, and size in bytes."""

    sha256: Digest
    size: int


def _is_plain(name: str) -> bool:
    """Return whether a path stays in the folder that it is relative to."""
    path = PurePosixPath(name)
    return (
        str(path) == name != "." and not path.is_absolute() and ".." not in path.parts and not set("\\\0") & set(name)
    )


@dataclass(frozen=True)
class Entry(JsonObject):
    """An artefact in the cache.

    key: hex sha256 of what it was made of. manifest: the file that names the others. files: blob by path, relative to
    the manifest.
    """

    key: str
    made_of: BuildKey
    manifest: str
    files: Mapping[Annotated[str, Bound("a path inside its folder", _is_plain)], Blob]

    def validate(self, stored: Mapping[str, Any]) -> None:
        if self.key != self.made_of.sha256 or self.manifest not in self.files:
            raise ValidationError("", "a key of what it was made of, and its manifest among its files", self.key)

    @property
    def stage(self) -> str:
        return self.made_of.stage

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.files.values())

    def __str__(self) -> str:
        return " ".join([self.stage, *self.made_of.names.values()])


def cache_folder(configured: str = "") -> Path | None:
    """Return the folder of the cache; None for none.

    LOCKSTEP_CACHE where it is set, also to nothing, else what the config says. The variable wins because where a cache
    lies is a matter of the machine, and a config is shared. Raises InputError where no folder can be.
    """
    where = VARIABLE if VARIABLE in os.environ else "config: cache"
    text = os.environ.get(VARIABLE, configured)
    if not text:
        return None
    if "\0" in text:
        raise InputError(f"{where}: expected the path of a folder, found {text!r}; correct it")
    folder = Path(os.path.expanduser(text))
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise InputError(
            f"{where}: expected a folder, or a path where one can be made, found that {there} "
            f"is a file; name another place or move the file away"
        )
    return folder


class Cache:
    """A cache at `folder`, which is made when something is first put into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = folder / "entries"
        self.blobs = folder / "blobs"

    def entry_path(self, key: str) -> Path:
        return self.entries / f"{key}.json"

    def blob_path(self, sha256: str) -> Path:
        return self.blobs / sha256

    def read(self, key: str) -> Entry | None:
        """Return the entry of a build key; None where there is none. Raises InputError when it is damaged."""
        path = self.entry_path(key)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                raise InputError(f"{path}: expected an entry of the cache, found a link to nothing") from None
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_ENTRY:
            what = "too large a file" if stat.S_ISREG(status.st_mode) else "what is no file"
            raise InputError(f"{path}: expected an entry of the cache, found {what}")
        try:
            entry = Entry.from_json(read_json(path, formats.CACHE))
        except (ValueError, RecursionError, ValidationError):
            entry = None
        if entry is None or entry.key != key:
            raise InputError(f"{path}: expected an entry of the cache, found other content")
        return entry

    def check_whole(self, entry: Entry) -> None:
        """Raise InputError when a blob of an entry is absent or of another size."""
        for blob in entry.files.values():
            if not _is_file(self.blob_path(blob.sha256), blob.size):
                raise InputError(
                    f"{self.blob_path(blob.sha256)}: expected a file of {blob.size} bytes, found none or another"
                )

    def take(self, blob: Blob, target: Path) -> None:
        """Copy a blob to the new file `target`.

        Raises InputError, and deletes the blob, when it is not what its name says.
        """
        source = self.blob_path(blob.sha256)
        copy(source, target)
        if (found := sha256_file(target)) != blob.sha256:
            delete(source)
            raise InputError(f"{source}: expected sha256 {blob.sha256}, found {found}: the file is damaged")

    def add(self, source: Path, sha256: str) -> Blob:
        """Put the file `source` in, unless it is there, whole. Raises InputError when it is not of this sha256."""
        path, size = self.blob_path(sha256), source.stat().st_size
        if _is_file(path, size) and sha256_file(path) == sha256:
            touch(path)  # young again: nobody drops it before its entry is written
            return Blob(sha256, size)
        with _new(path) as temporary:
            copy(source, temporary)
            if (found := sha256_file(temporary)) != sha256:
                raise InputError(f"{source}: expected sha256 {sha256}, found {found}: the file has changed")
        return Blob(sha256, size)

    def write(self, made_of: BuildKey, manifest: str, files: Mapping[str, Blob]) -> Entry:
        entry = Entry(made_of.sha256, made_of, manifest, dict(files))
        with _new(self.entry_path(entry.key)) as temporary:
            write_json(temporary, {"format": formats.CACHE, **entry.to_json()})
        return entry


def _new(path: Path) -> contextlib.AbstractContextManager[Path]:
    """Give a temporary path, as `atomic_path`, where several machines write. Process numbers do not tell them apart."""
    return atomic_path(path, secrets.token_hex(8))


def copy(source: Path, target: Path) -> None:
    """Copy the bytes of a file to the new file `target`, in the kernel where it can.

    There the two share blocks until one is written to.
    """
    with open(source, "rb") as reader, open(target, "xb") as writer:
        if not _copied_in_kernel(reader, writer):
            reader.seek(0), writer.seek(0)
            writer.truncate()
            shutil.copyfileobj(reader, writer, 1 << 20)


def _copied_in_kernel(reader: BinaryIO, writer: BinaryIO) -> bool:
    if not hasattr(os, "copy_file_range"):
        return False
    try:
        while os.copy_file_range(reader.fileno(), writer.fileno(), _CHUNK):
            pass
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
        return False
    # some file systems end early and say nothing
    return os.fstat(writer.fileno()).st_size == os.fstat(reader.fileno()).st_size


def delete(path: Path) -> None:
    """Delete a file that is worth nothing. Where that is not allowed it stays, and is not used either."""
    with contextlib.suppress(OSError):
        path.unlink()


def touch(path: Path) -> None:
    """Note that a file was used; in a cache that cannot be written nothing is noted."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _is_file(path: Path, size: int) -> bool:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size
