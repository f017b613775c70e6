"""Upkeep of a cache: listing it, verifying it, and pruning it.

It is safe while others use the cache. An entry that is dropped is a miss for whoever comes next, and no more. What is
in the making, blobs without an entry yet and temporary files, is left alone for an hour; hours are told by the clock of
the disk that the cache lies on, for those of several machines differ.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.artifacts.files import sha256_file
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import THREADS
from lockstep.provenance.cache.store import DIGEST, Blob, Cache, Entry, delete

IN_THE_MAKING = 3600  # seconds since a blob or a temporary file was last written to
_TEMPORARY = re.compile(r"\..*\.tmp")


@dataclass(frozen=True)
class Used:
    """An entry, and when it was last put or taken: seconds since 1970."""

    entry: Entry
    last_use: float


@dataclass
class Contents:
    """The contents of a cache.

    damaged: lines by path of entries that are worth nothing. blobs: size by sha256 of the files there. temporary,
    foreign: paths of files in the making or left over, and of what is not the cache's own.
    """

    entries: list[Used] = field(default_factory=list)
    damaged: dict[Path, str] = field(default_factory=dict)
    blobs: dict[str, int] = field(default_factory=dict)
    temporary: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    @property
    def named(self) -> set[str]:
        return {blob.sha256 for used in self.entries for blob in used.entry.files.values()}

    @property
    def size(self) -> int:
        return sum(self.blobs.values())


@dataclass
class Pruned:
    """The number of things dropped. size: bytes of blobs and temporary files."""

    entries: int = 0
    files: int = 0
    size: int = 0


def look(cache: Cache) -> Contents:
    """Return what is in the cache, by name and size.

    Entries by stage, in each those used last first. Raises InputError where there is no folder.
    """
    if not cache.folder.is_dir():
        raise InputError(
            f"{cache.folder}: expected a cache, found no folder; it is made when something is first put into it"
        )
    contents = Contents()
    for path in _listed(cache.blobs, contents):
        if DIGEST.fullmatch(path.name) and path.is_file():
            with contextlib.suppress(FileNotFoundError):  # another machine prunes
                contents.blobs[path.name] = path.stat().st_size
        else:
            contents.foreign.append(path)
    for path in _listed(cache.entries, contents):
        if not (DIGEST.fullmatch(path.stem) and path.suffix == ".json"):
            contents.foreign.append(path)
            continue
        try:
            entry = cache.read(path.stem)
            if entry is not None:
                cache.check_whole(entry)
                contents.entries.append(Used(entry, path.stat().st_mtime))
        except FileNotFoundError:
            continue  # another machine prunes
        except InputError as error:
            contents.damaged[path] = str(error)
    contents.entries.sort(key=lambda used: (used.entry.stage, -used.last_use, used.entry.key))
    return contents


def _listed(folder: Path, contents: Contents) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                contents.temporary.append(path)
            else:
                yield path
    elif folder.exists():
        contents.foreign.append(folder)


def verify(cache: Cache) -> list[str]:
    """Hash all blobs; return a line for each fault. What is damaged, incomplete or not the cache's own."""
    contents = look(cache)
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _damage(cache, name), sorted(contents.blobs))
        lines = [line for line in found if line]
    lines += [
        f"{path}: {line.removeprefix(f'{path}: ')}" for path, line in contents.damaged.items() if os.path.lexists(path)
    ]
    return lines + [f"{path}: expected only files of the cache, found another" for path in contents.foreign]


def _damage(cache: Cache, sha256: str) -> str | None:
    path = cache.blob_path(sha256)
    try:
        found = sha256_file(path)
    except FileNotFoundError:
        return None  # another machine prunes
    return None if found == sha256 else f"{path}: expected sha256 {sha256}, found {found}"


def prune(cache: Cache, max_size: float | None = None, older_than: float | None = None) -> Pruned:
    """Drop old entries, then those used longest ago until the rest fits `max_size`.

    Old entries were not used for `older_than` seconds; the blobs of the others take `max_size` bytes at most. Damaged
    entries, blobs that no entry names, and temporary files that were left over are dropped too.
    """
    contents, now, pruned = look(cache), _now(cache), Pruned()
    kept = sorted(contents.entries, key=lambda used: (-used.last_use, used.entry.key))
    if older_than is not None:
        kept = [used for used in kept if now - used.last_use <= older_than]
    if max_size is not None:
        kept = kept[: _fitting(kept, max_size)]
    keys = {used.entry.key for used in kept}
    dropped = [used.entry for used in contents.entries if used.entry.key not in keys]
    for path in [*contents.damaged, *(cache.entry_path(entry.key) for entry in dropped)]:
        delete(path)
        pruned.entries += not path.exists()
    named = look(cache).named  # with what others have put meanwhile
    just_dropped = {blob.sha256 for entry in dropped for blob in entry.files.values()} - named
    left = [cache.blob_path(sha256) for sha256 in contents.blobs.keys() - named - just_dropped] + contents.temporary
    for path in [cache.blob_path(sha256) for sha256 in just_dropped] + [path for path in left if _is_old(path, now)]:
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            pruned.files, pruned.size = pruned.files + 1, pruned.size + size
    return pruned


def _fitting(entries: list[Used], max_size: float) -> int:
    """Return how many of the first `entries` have blobs of `max_size` bytes at most.

    A blob of several entries is counted once.
    """
    counted: set[Blob] = set()
    size = 0
    for number, used in enumerate(entries):
        new = set(used.entry.files.values()) - counted
        counted |= new
        size += sum(blob.size for blob in new)
        if size > max_size:
            return number
    return len(entries)


def _is_old(path: Path, now: float) -> bool:
    try:
        return now - path.stat().st_mtime > IN_THE_MAKING
    except FileNotFoundError:
        return False


def _now(cache: Cache) -> float:
    """Return the time by the clock that stamps the cache's files."""
    path = cache.folder / f".{secrets.token_hex(8)}.tmp"
    try:
        path.touch(exist_ok=False)
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def summary(contents: Contents) -> str:
    rest = {
        "damaged": contents.damaged,
        "that no entry names": contents.blobs.keys() - contents.named,
        "temporary": contents.temporary,
        "foreign": contents.foreign,
    }
    more = [f"{len(paths)} {what}" for what, paths in rest.items() if paths]
    entries = f"{len(contents.entries)} {'entry' if len(contents.entries) == 1 else 'entries'}"
    return ", ".join([entries, f"{len(contents.blobs)} files of {bytes_text(contents.size)}", *more])


def bytes_text(size: float) -> str:
    """Return a number of bytes in words, `8.2 MB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
