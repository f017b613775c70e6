"""The archive of a bundle: a tar file whose every byte follows from its manifest.

Files in, the archive out, and back. The manifest is its first file.

Written in one way only (POSIX ustar: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html): regular
files, sorted by name, owner and time zero, mode 644, sizes from 8 GiB on as GNU tar writes them, nothing between or
after. So the reader needs no tar reader: it knows each header from the manifest, and refuses whatever differs. It is
not compressed: weights hardly shrink, compressors differ from version to version, and weights are read in place.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document, Mark, ValidationError, integers
from lockstep.artifacts.files import atomic_path
from lockstep.errors import InputError

MANIFEST = "bundle.json"
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_PIECE = 1 << 20
_LARGEST_MANIFEST = 16 << 20
_OCTAL_LIMIT = 8**11
_LARGEST_FILE = (1 << 62) - 1


@dataclass(frozen=True)
class Entry:
    """A file to pack: its name in the archive, size, hex sha256, and what opens it."""

    name: str
    size: int
    sha256: str
    open: Callable[[], BinaryIO]

    @classmethod
    def of_file(cls, name: str, path: Path, sha256: str) -> Entry:
        return cls(name, path.stat().st_size, sha256, lambda: open(path, "rb"))

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Entry:
        return cls(name, len(data), hashlib.sha256(data).hexdigest(), lambda: io.BytesIO(data))


@dataclass(frozen=True)
class Listed:
    """A file that the manifest lists. Its name is checked by `_check_listed`."""

    path: str
    size: Annotated[int, integers(0, _LARGEST_FILE)]
    sha256: str


@dataclass(frozen=True)
class BundleManifest(Document):
    """The first file of an archive: the files after it, and what `bundle.opened` reads of it besides."""

    FORMAT: ClassVar[str] = formats.BUNDLE
    files: tuple[Listed, ...]
    about: Annotated[Mapping[str, Any], Mark.OTHERS]


@dataclass(frozen=True)
class Member:
    """A file of an archive: `size` bytes at `offset`."""

    name: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """An archive whose headers are as they must be. Contents are not read yet."""

    path: Path
    size: int
    manifest: BundleManifest
    members: Mapping[str, Member]


def write_archive(path: Path, about: Mapping[str, Any], entries: Sequence[Entry]) -> Path:
    """Write the bundle of `entries`, whole or not at all.

    Its manifest says `about` and lists the entries. Large files are streamed. Raises InputError for a file that is not
    of its digest.
    """
    entries = sorted(entries, key=lambda entry: entry.name)
    manifest = BundleManifest(tuple(Listed(entry.name, entry.size, entry.sha256) for entry in entries), about)
    first = Entry.of_bytes(MANIFEST, manifest.to_bytes())
    _check_listed(path, manifest.files)
    with atomic_path(path) as temporary, open(temporary, "wb") as out:
        write_tar(out, (first, *entries), path)
    return path


def write_tar(out: BinaryIO, entries: Iterable[Entry], path: Path) -> None:
    """Write a tar file of `entries` in this form. path: what messages call it.

    Raises InputError for a file that is not of its digest.
    """
    for entry in entries:
        out.write(header(entry.name, entry.size))
        digest, size = hashlib.sha256(), 0
        with entry.open() as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
                out.write(piece)
        if (size, digest.hexdigest()) != (entry.size, entry.sha256):
            expected = f"{entry.size} bytes of sha256 {entry.sha256}"
            raise InputError(
                f"{path}: {entry.name}: expected {expected}, found others: the file has changed; run `lockstep verify`"
            )
        out.write(bytes(-size % _BLOCK))
    out.write(_END)


def header(name: str, size: int) -> bytes:
    """Return the 512 bytes before a file's content."""
    length = _octal(size, 12) if size < _OCTAL_LIMIT else b"\x80" + size.to_bytes(11, "big")
    start = name.encode().ljust(100, b"\0") + _octal(0o644, 8) + _octal(0, 8) + _octal(0, 8) + length + _octal(0, 12)
    end = (b"0".ljust(101, b"\0") + b"ustar\x0000").ljust(_BLOCK - len(start) - 8, b"\0")
    return start + f"{sum(start) + sum(end) + 8 * ord(' '):06o}\0 ".encode() + end


def _octal(value: int, width: int) -> bytes:
    return f"{value:0{width - 1}o}\0".encode()


def read_archive(path: str | os.PathLike) -> Archive:
    """Read the manifest and the members of a bundle.

    Raises InputError for a file that is no bundle, is cut short, or holds anything but the files that its manifest
    lists.
    """
    path = Path(path)
    try:
        file = open(path, "rb")
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(
            f"{path}: expected a bundle, found {'a folder' if path.is_dir() else 'no file'}; "
            f"make one with `lockstep bundle`"
        ) from None
    with file:
        size = os.fstat(file.fileno()).st_size
        manifest, offset = _read_manifest(file, path)
        _check_listed(path, manifest.files)
        members = {}
        for listed in manifest.files:
            if listed.size > size:
                raise InputError(
                    f"{path}: expected {listed.path} of {listed.size} bytes, found a bundle of {size}: it is cut "
                    "short; copy it again"
                )
            file.seek(offset)
            found = file.read(_BLOCK)
            if found != header(listed.path, listed.size):
                expected = f"the file {listed.path} of {listed.size} bytes at byte {offset}"
                raise InputError(
                    f"{path}: expected {expected}, found {_words(found)}; take a bundle as `lockstep bundle` made it"
                )
            members[listed.path] = Member(listed.path, offset + _BLOCK, listed.size, listed.sha256)
            offset = _behind(offset + _BLOCK + listed.size)
        file.seek(min(offset, size))
        end = file.read(len(_END))
        if size != offset + len(_END) or any(end):
            behind = _words(end[:_BLOCK]) if any(end) else f"{size} bytes"
            raise InputError(
                f"{path}: expected the end at byte {offset + len(_END)}, found {behind}: cut "
                f"short, or more than the manifest lists; copy it again"
            )
    return Archive(path, size, manifest, members)


def _read_manifest(file: BinaryIO, path: Path) -> tuple[BundleManifest, int]:
    remedy = "make one with `lockstep bundle`, or copy it again"
    first = file.read(_BLOCK)
    try:
        info = tarfile.TarInfo.frombuf(first, "utf-8", "surrogateescape")
        size = info.size
    except tarfile.TarError:
        info, size = None, 0
    if info is None or first != header(MANIFEST, size) or size > _LARGEST_MANIFEST:
        raise InputError(f"{path}: expected a bundle, which starts with {MANIFEST}, found {_words(first)}; {remedy}")
    data = file.read(size)
    try:
        manifest = BundleManifest.from_json(json.loads(data))
        is_whole = data == manifest.to_bytes() and not any(file.read(-size % _BLOCK))
    except (ValueError, RecursionError, ValidationError):
        is_whole = False
    if not is_whole:
        raise InputError(
            f"{path}: {MANIFEST}: expected the sealed manifest of a bundle ({formats.BUNDLE}), "
            f"found something else; {remedy}"
        )
    return manifest, _behind(_BLOCK + size)


def _check_listed(path: Path, listed: Sequence[Listed]) -> None:
    names = [entry.path for entry in listed]
    for name in names:
        if problem := _problem(name):
            raise InputError(f"{path}: expected names of files below the bundle, found {name!r}, {problem}; refused")
    folded = [name.casefold() for name in (MANIFEST, *names)]  # some file systems take A and a for one
    if names != sorted(names) or len(set(folded)) != len(folded):
        twice = next((name for name in names if folded.count(name.casefold()) > 1), None)
        raise InputError(
            f"{path}: expected sorted names, each once, found "
            f"{f'{twice!r} twice' if twice else 'another order'}; refused"
        )
    above = {parent.as_posix() for name in folded for parent in PurePosixPath(name).parents}
    if both := next((name for name in (MANIFEST, *names) if name.casefold() in above), None):
        raise InputError(f"{path}: expected each name as a file or a folder, found {both!r} as both; refused")


def _problem(name: str) -> str:
    """Return why a name must not be unpacked; empty where it may be."""
    if name.startswith("/") or PurePosixPath(name).is_absolute() or ":" in name.partition("/")[0]:
        return "an absolute path"
    if ".." in name.split("/"):
        return "which leads out of it"
    if (
        any(part in ("", ".") for part in name.split("/"))
        or "\\" in name
        or not name.isprintable()
        or len(name.encode()) > 100
    ):
        return "which is no plain name of at most 100 bytes"
    return ""


def _words(found: bytes) -> str:
    """Return in words what stands where a header should be."""
    try:
        info = tarfile.TarInfo.frombuf(found, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        return f"none ({error})"
    kind = "the file" if info.isreg() else f"an entry of type {ascii(info.type.decode('latin-1'))},"
    return f"{kind} {ascii(info.name[:100])} of {info.size} bytes"


def _behind(offset: int) -> int:
    return offset + -offset % _BLOCK


def contents(archive: Archive, digest: Any) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Yield each member with its bytes, in pieces.

    The pieces must be taken before the next member. `digest` is fed every byte of the archive. Raises InputError after
    the last piece of a file that is not of its sha256, or where a gap between files is not empty.
    """
    with open(archive.path, "rb") as file:
        position = 0
        for member in archive.members.values():
            _feed(file, member.offset - position, digest)
            yield member, _pieces(archive, file, member, digest)
            position = _behind(member.offset + member.size)
            padding = file.read(position - member.offset - member.size)
            digest.update(padding)
            if any(padding):
                raise InputError(
                    f"{archive.path}: expected zeros behind {member.name}, found others: the "
                    f"bundle is damaged; copy it again"
                )
        _feed(file, archive.size - position, digest)


def _pieces(archive: Archive, file: BinaryIO, member: Member, digest: Any) -> Iterator[bytes]:
    own, left = hashlib.sha256(), member.size
    while left:
        piece = file.read(min(_PIECE, left))
        if not piece:
            raise InputError(
                f"{archive.path}: {member.name}: expected {member.size} bytes, found "
                f"{member.size - left}: the file has changed; copy it again"
            )
        own.update(piece)
        digest.update(piece)
        left -= len(piece)
        yield piece
    if own.hexdigest() != member.sha256:
        raise InputError(
            f"{archive.path}: {member.name}: expected sha256 {member.sha256}, found "
            f"{own.hexdigest()}: the bundle is damaged; copy it again"
        )


def _feed(file: BinaryIO, count: int, digest: Any) -> None:
    while count:
        piece = file.read(min(_PIECE, count))
        if not piece:
            return  # cut short meanwhile: the next file says so
        digest.update(piece)
        count -= len(piece)
