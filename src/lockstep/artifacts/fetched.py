"""The manifest of a checkpoint that was fetched or made, `source.json`.

The folder `checkpoint/` next to it holds its files. It records the source and commit, and the size and sha256 of each
file, so that a change is detected and a moving branch stays at its commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import Bytes, Digest
from lockstep.artifacts.document import Document, Key
from lockstep.artifacts.files import remove_leftovers
from lockstep.artifacts.places import StoredFile, StoredFiles

FOLDER = "checkpoint"


@dataclass(frozen=True)
class GgufDigest:
    """The bytes of a GGUF file and their sha256."""

    sha256: Digest
    size: Bytes


@dataclass(frozen=True)
class Fetched(Document):
    """The files of a fetched checkpoint, relative to the manifest, and where they come from.

    commit: of the repository, None if it was made here. seed: of a random checkpoint. gguf_file: what the checkpoint
    was made of, None for others.
    """

    FORMAT: ClassVar[str] = formats.SOURCE
    source: str
    files: StoredFiles
    commit: str | None = None
    repository: str | None = None
    revision: str | None = None
    seed: int | None = None
    gguf_file: Annotated[GgufDigest | None, Key("gguf")] = None

    @property
    def sha256(self) -> dict[str, str]:
        return {Path(file.path).name: file.sha256 for file in self.files}

    @property
    def gguf(self) -> str | None:
        """Return the digest of the GGUF file that the checkpoint was made of, None for others."""
        return self.gguf_file.sha256 if self.gguf_file else None


def folder_of(manifest: Path) -> Path:
    return manifest.with_name(FOLDER)


def load_if_same_source(manifest: Path, source: str) -> Fetched | None:
    """Return the manifest of an earlier fetch, if it is there and of the same `source`."""
    if not manifest.is_file():
        return None
    fetched = Fetched.load(manifest)
    return fetched if fetched.source == source else None


def write_fetched(manifest: Path, source: str, sha256: Mapping[str, str], **fields: Any) -> Path:
    """Write the manifest of the files of `folder_of(manifest)`. fields: more of `Fetched`, such as the commit."""
    folder = folder_of(manifest)
    files = []
    for name, digest in sorted(sha256.items()):
        files.append(StoredFile(f"{FOLDER}/{name}", (folder / name).stat().st_size, digest))
    # Clean up after killed fetches. The manifest is written last, because it makes the files a checkpoint.
    remove_leftovers(manifest)
    Fetched(source, tuple(files), **fields).save(manifest)
    return manifest
