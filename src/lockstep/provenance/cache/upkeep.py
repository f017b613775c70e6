"""Upkeep of a cache: its contents, and pruning it.

It is safe while others use the cache: an entry that is dropped is a miss for the next one who asks. Blobs without an
entry yet and temporary files are being written, and stay for an hour.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.artifacts.statement import Statement
from lockstep.errors import InputError, LockstepError
from lockstep.provenance.cache.store import Cache, delete

IN_THE_MAKING = 3600  # seconds since a blob or a temporary file was last written to
_NAME = re.compile(r"[0-9a-f]{64}(\.json)?|\..*\.tmp")


@dataclass(frozen=True)
class Used:
    """An entry, and when it was last put or taken: seconds since 1970."""

    entry: Statement
    last_use: float

    @property
    def blobs(self) -> set[str]:
        return set(self.entry.outputs.values())


@dataclass
class Contents:
    """The contents of a cache. Entries are by stage, in each those used last first.

    damaged: {path: reason}. blobs: {sha256: size}. temporary: files that are being written, or left over.
    """

    entries: list[Used] = field(default_factory=list)
    damaged: dict[Path, str] = field(default_factory=dict)
    blobs: dict[str, int] = field(default_factory=dict)
    temporary: list[Path] = field(default_factory=list)

    @property
    def named(self) -> set[str]:
        return set().union(*(used.blobs for used in self.entries))

    @property
    def size(self) -> int:
        return sum(self.blobs.values())


@dataclass
class Pruned:
    """The number of things dropped. size: bytes of blobs and temporary files."""

    entries: int = 0
    files: int = 0
    size: int = 0


def scan(cache: Cache) -> Contents:
    """Return the contents of the cache, by names and sizes alone. Raises InputError where there is no folder."""
    if not cache.folder.is_dir():
        raise InputError(
            f"{cache.folder}: expected a cache, found no folder; it is made when something is first put into it"
        )
    contents = Contents()
    for path in sorted(path for path in cache.folder.glob("*/*") if _NAME.fullmatch(path.name)):
        try:
            if path.suffix == ".tmp":
                contents.temporary.append(path)
            elif path.parent == cache.entries:
                if entry := cache.read(path.stem):
                    contents.entries.append(Used(entry, path.stat().st_mtime))
            elif path.is_file():
                contents.blobs[path.name] = path.stat().st_size
            else:
                contents.damaged[path] = f"{path}: expected a file, found none"
        except FileNotFoundError:
            continue  # another machine prunes
        except LockstepError as error:
            contents.damaged[path] = str(error)
    contents.entries.sort(key=lambda used: (used.entry.key.stage, -used.last_use, used.entry.key.sha256))
    return contents


def prune(cache: Cache, max_size: float | None = None, older_than: float | None = None) -> Pruned:
    """Drop old entries, then those used longest ago until the rest fits `max_size`.

    Old entries were not used for `older_than` seconds; the blobs of the others take `max_size` bytes at most. Damaged
    entries, blobs that no entry names, and temporary files that were left over are dropped too.
    """
    contents = scan(cache)
    now = time.time()
    pruned = Pruned()
    kept_blobs: set[str] = set()
    dropped: dict[str, float] = {}  # blobs, and the last use of their entries
    size = 0
    is_over = False
    for used in sorted(contents.entries, key=lambda used: (-used.last_use, used.entry.key.sha256)):
        size += sum(contents.blobs.get(sha256, 0) for sha256 in used.blobs - kept_blobs)
        is_old = older_than is not None and now - used.last_use > older_than
        is_over = is_over or is_old or (max_size is not None and size > max_size)
        if not is_over:
            kept_blobs.update(used.blobs)
        else:
            dropped |= {sha256: max(used.last_use, dropped.get(sha256, 0)) for sha256 in used.blobs}
            path = cache.entry_path(used.entry.key.sha256)
            delete(path)
            pruned.entries += not path.exists()
    for path in contents.damaged:
        delete(path)
        pruned.entries += not path.exists()
    named = scan(cache).named  # once more: others may have added entries meanwhile
    for path in [*map(cache.blob_path, contents.blobs.keys() - named), *contents.temporary]:
        try:
            stat = path.stat()
            # Younger than the last use of its entries: another machine has touched it, and writes its own entry soon.
            is_unused = stat.st_mtime <= dropped.get(path.name, -math.inf)
            if is_unused or now - stat.st_mtime > IN_THE_MAKING:
                path.unlink()
                pruned.files += 1
                pruned.size += stat.st_size
        except FileNotFoundError:
            continue  # another machine prunes
    return pruned


def bytes_text(size: float) -> str:
    """Return a number of bytes in words, `8.2 MB`, in powers of 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    size /= 1000
    return f"{size:.1f} TB"
