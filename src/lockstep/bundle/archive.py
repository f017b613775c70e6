"""The archive of a bundle: a tar file whose every byte follows from its manifest, its first file.

Written in one way only (POSIX ustar: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html): regular
files, in order of their names, owner and time zero, mode 644, sizes from 8 GiB on as GNU tar writes them, nothing
between or after. So each header follows from the manifest, and any other is rejected; a valid bundle is a plain tar
file, which `tarfile` reads. It is not compressed: weights hardly shrink, compressors differ from version to version,
and weights are read in place.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Literal

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import Bytes, Digest, PlainPath, Precision, Size
from lockstep.artifacts.document import Document, Mark, ValidationError, matching
from lockstep.artifacts.files import atomic_path
from lockstep.errors import InputError

MANIFEST = "bundle.json"
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_PIECE = 1 << 20  # bytes that are read at a time
_LARGEST_MANIFEST = 16 << 20  # bytes; it is read whole before it is checked
_OCTAL_LIMIT = 8**11  # ustar has 11 octal digits for a size


@dataclass(frozen=True)
class Listed:
    """A file that the manifest lists."""

    path: PlainPath
    size: Bytes
    sha256: Digest


@dataclass(frozen=True)
class BundledTarget:
    """The target as the bundle's manifest has it."""

    model: Annotated[str, matching(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,255}", "a model's name")]
    precision: Precision
    layers: Literal["all"] | Size
    backend: Annotated[str, matching("[a-z_]+", "a backend's name")]


@dataclass(frozen=True)
class BundledLimits:
    """The limits as the bundle's manifest has them."""

    max_batch_size: Size
    max_input_len: Size
    max_seq_len: Size
    max_num_tokens: Size


@dataclass(frozen=True)
class About:
    """The entries of a bundle's manifest besides its files."""

    target: BundledTarget
    limits: BundledLimits
    weights: Literal["inside", "apart"]


@dataclass(frozen=True)
class BundleManifest(Document):
    """The first file of an archive."""

    FORMAT: ClassVar[str] = formats.BUNDLE
    about: Annotated[About, Mark.INLINED]
    files: tuple[Listed, ...]

    def validate(self, stored: Mapping[str, object]) -> None:
        names = [file.path for file in self.files]
        if names != sorted({*names} - {MANIFEST}):
            raise ValidationError("files", "sorted names, each once", names)
        if long := [name for name in names if len(name.encode()) > 100]:
            raise ValidationError("files", "names of at most 100 bytes, as tar has them", long[0])
        # Some disks ignore case, and no disk has a file and a folder of one name. With a slash at the end, a file comes
        # right before the files "inside" it.
        by_place = sorted(names, key=lambda name: f"{name.casefold()}/")
        for name, after in itertools.pairwise(by_place):
            if f"{after.casefold()}/".startswith(f"{name.casefold()}/"):
                raise ValidationError("files", f"no name that takes the place of {name!r} on any disk", after)


@dataclass(frozen=True)
class Entry:
    """A file to pack: its name in the archive, size, hex sha256, and a function that opens it."""

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
class Member:
    """A file of an archive: `size` bytes at `offset`."""

    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """An archive with valid headers. members: {name: member}, in order. size: of the archive in bytes."""

    path: Path
    size: int
    manifest: BundleManifest
    members: Mapping[str, Member]


def write_archive(path: Path, about: About, entries: Sequence[Entry]) -> Path:
    """Write the bundle of `entries`, whole or not at all. Raises InputError for a file that is not of its digest."""
    entries = sorted(entries, key=lambda entry: entry.name)
    manifest = BundleManifest(about, tuple(Listed(entry.name, entry.size, entry.sha256) for entry in entries))
    # By the rules of readers, so that no bundle is written that cannot be opened.
    try:
        BundleManifest.from_json(manifest.to_json())
    except ValidationError as error:
        raise InputError(f"{path}: {error}") from None
    with atomic_path(path) as temporary, open(temporary, "wb") as out:
        for entry in (Entry.of_bytes(MANIFEST, manifest.to_bytes()), *entries):
            _write_file(out, entry, path)
        out.write(_END)
    return path


def _write_file(out: BinaryIO, entry: Entry, path: Path) -> None:
    out.write(header(entry.name, entry.size))
    digest = hashlib.sha256()
    size = 0
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


def header(name: str, size: int) -> bytes:
    if size < _OCTAL_LIMIT:
        length = _octal(size, 12)
    else:  # GNU's base-256 form
        length = b"\x80" + size.to_bytes(11, "big")
    start = name.encode().ljust(100, b"\0") + _octal(0o644, 8) + _octal(0, 8) + _octal(0, 8) + length + _octal(0, 12)
    end = (b"0".ljust(101, b"\0") + b"ustar\x0000").ljust(_BLOCK - len(start) - 8, b"\0")
    # The checksum between them counts its own 8 bytes as spaces.
    return start + f"{sum(start) + sum(end) + 8 * ord(' '):06o}\0 ".encode() + end


def _octal(value: int, width: int) -> bytes:
    return f"{value:0{width - 1}o}\0".encode()


def read_archive(path: str | os.PathLike) -> Archive:
    """Read the manifest of a bundle, and compare all headers with it. Contents are not read yet.

    Raises InputError for a file that is no bundle, is cut short, or holds anything but the files that its manifest
    lists.
    """
    path = Path(path)
    if not os.path.isfile(path):
        actual = "no file"
        if os.path.isdir(path):
            actual = "a folder"
        raise InputError(f"{path}: expected a bundle, found {actual}; make one with `lockstep bundle`")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        members = {}
        manifest, offset = _read_manifest(file, path)
        for listed in manifest.files:
            # A manifest may claim sizes far beyond the file, to which a seek fails.
            file.seek(min(offset, size))
            block = file.read(_BLOCK)
            if block != header(listed.path, listed.size):
                expected = f"the file {listed.path} of {listed.size} bytes at byte {offset}"
                raise InputError(
                    f"{path}: expected {expected}, found {_words(block)}; take a bundle as `lockstep bundle` made it"
                )
            members[listed.path] = Member(offset + _BLOCK, listed.size, listed.sha256)
            offset += _BLOCK + listed.size + -listed.size % _BLOCK
    if size != offset + len(_END):
        raise InputError(
            f"{path}: expected the end at byte {offset + len(_END)}, found {size} bytes: cut short, or more than the "
            "manifest lists; copy it again"
        )
    return Archive(path, size, manifest, members)


def _read_manifest(file: BinaryIO, path: Path) -> tuple[BundleManifest, int]:
    """Return the manifest, and the offset of the first file."""
    first = file.read(_BLOCK)
    remedy = "make one with `lockstep bundle`, or copy it again"
    size = 0
    if first.startswith(MANIFEST.encode()):
        size = _info(first).size
    # The size is the header's only freedom: written again with it, the header must come out the same.
    if first != header(MANIFEST, size) or size > _LARGEST_MANIFEST:
        raise InputError(f"{path}: expected a bundle, which starts with {MANIFEST}, found {_words(first)}; {remedy}")
    data = file.read(size)
    try:
        manifest = BundleManifest.from_json(json.loads(data))
        # The manifest must be the canonical bytes of its content: a bundle has one form only.
        if data != manifest.to_bytes() or any(file.read(-size % _BLOCK)):
            raise ValidationError("", f"the content of a bundle's digest ({formats.BUNDLE})", "other entries")
    except (ValueError, RecursionError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: {MANIFEST}: {reason}; {remedy}") from None
    return manifest, file.tell()


def _info(block: bytes) -> tarfile.TarInfo:
    """Return a header as `tarfile` reads it; an empty one where it is none."""
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return tarfile.TarInfo()


def _words(block: bytes) -> str:
    """Describe the bytes where a header is expected."""
    info = _info(block)
    if not info.name:
        return "none"
    kind = "the file"
    if not info.isreg():
        kind = f"an entry of type {ascii(info.type.decode('latin-1'))},"
    return f"{kind} {ascii(info.name[:100])} of {info.size} bytes"


def check_contents(archive: Archive) -> str:
    """Read every byte of an archive; return its hex sha256.

    Raises InputError for a file that is not of its digest, and where a gap between files is not empty.
    """
    archive_hash = hashlib.sha256()
    with open(archive.path, "rb") as file:
        # All before the first member's header is the manifest, which `read_archive` has checked.
        offsets = [member.offset - _BLOCK for member in archive.members.values()]
        archive_hash.update(file.read(min(offsets, default=archive.size - len(_END))))
        for name, member in archive.members.items():
            archive_hash.update(file.read(_BLOCK))  # its header, which was compared
            file_hash = hashlib.sha256()
            remaining = member.size
            while remaining and (piece := file.read(min(_PIECE, remaining))):
                file_hash.update(piece)
                archive_hash.update(piece)
                remaining -= len(piece)
            gap = file.read(-member.size % _BLOCK)
            archive_hash.update(gap)
            if file_hash.hexdigest() != member.sha256 or any(gap):
                raise InputError(
                    f"{archive.path}: {name}: expected sha256 {member.sha256} and zeros after it, found "
                    f"{file_hash.hexdigest()}: the bundle is damaged; copy it again"
                )
        end = file.read(len(_END))
        archive_hash.update(end)
        if any(end):
            raise InputError(f"{archive.path}: expected zeros at the end, found others; copy it again")
    return archive_hash.hexdigest()
