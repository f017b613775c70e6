"""The folder of a cache: blobs by their sha256, entries by their build key.

Files in, verified copies out; only the standard library. An entry is the statement of an artefact, whose subjects are
blobs.

Files are written to a temporary name in the same folder, flushed and renamed, so that others see them whole or not at
all. Names of temporary files are random: process ids of two machines may be equal. Damaged files are never used, and
deleted where that is allowed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from lockstep.artifacts.files import atomic_path, sha256_file
from lockstep.artifacts.statement import Statement
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import size_of

VARIABLE = "LOCKSTEP_CACHE"


def cache_folder(configured: str = "") -> Path | None:
    """Return the folder of the cache; None for none.

    LOCKSTEP_CACHE where it is set, also to nothing, else the config's. The variable wins because the place of a cache
    depends on the machine, and a config is shared. Raises InputError where no folder can be.
    """
    where = VARIABLE if VARIABLE in os.environ else "config: cache"
    text = os.environ.get(VARIABLE, configured)
    if not text:
        return None
    folder = Path(os.path.expanduser(text))
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise InputError(
            f"{where}: expected a folder, or a path where one can be made, found that {existing} "
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

    def read(self, key: str) -> Statement | None:
        """Return the entry of a build key; None where there is none.

        Raises LockstepError when it is damaged, or one of its blobs is not there.
        """
        path = self.entry_path(key)
        if not os.path.lexists(path):
            return None
        entry = Statement.load(path)
        if entry.key.sha256 != key:
            raise InputError(f"{path}: expected an entry of this build key, found that of another")
        for sha256 in entry.outputs.values():
            if size_of(self.blob_path(sha256)) is None:
                raise InputError(f"{self.blob_path(sha256)}: expected a file that {path.name} names, found none")
        return entry

    def take(self, sha256: str, target: Path) -> None:
        """Copy a blob to the new file `target`.

        Raises InputError, and deletes the blob, when it does not have the digest in its name.
        """
        source = self.blob_path(sha256)
        touch(source)
        shutil.copyfile(source, target)
        actual = sha256_file(target)
        if actual != sha256:
            delete(source)
            raise InputError(f"{source}: expected sha256 {sha256}, found {actual}: the file is damaged")

    def add(self, source: Path, sha256: str) -> None:
        """Put the file `source` in, unless it is there, whole. Raises InputError when it is not of this sha256."""
        path = self.blob_path(sha256)
        if size_of(path) == source.stat().st_size and sha256_file(path) == sha256:
            return touch(path)  # what was not used for long may be deleted by age before its entry is written
        with atomic_path(path, secrets.token_hex(8)) as temporary:
            shutil.copyfile(source, temporary)
            actual = sha256_file(temporary)
            if actual != sha256:
                raise InputError(f"{source}: expected sha256 {sha256}, found {actual}: the file has changed")

    def write(self, entry: Statement) -> None:
        with atomic_path(self.entry_path(entry.key.sha256), secrets.token_hex(8)) as temporary:
            temporary.write_bytes(entry.to_bytes())


def delete(path: Path) -> None:
    """Delete a damaged or unused file where that is allowed."""
    with contextlib.suppress(OSError):
        path.unlink()


def touch(path: Path) -> None:
    """Set the time of a file's last use, where the cache can be written."""
    with contextlib.suppress(OSError):
        os.utime(path)
