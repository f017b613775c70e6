"""The manifest of a checkpoint that was fetched or made, `source.json`.

The folder `checkpoint/` beside it holds its files. In: files in the hub's cache, or files just written. Out: what was
taken from where, each file with size and sha256, so that a change is seen and a moving branch stays where it was found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import read_json, remove_leftovers, write_json

FOLDER = "checkpoint"


@dataclass(frozen=True)
class Fetched:
    """The digests of a fetched checkpoint's files, and its commit.

    `sha256`: hex digest by file name. `commit` of the repository it came from, None if it was made here. `gguf`: the
    digest of the GGUF file that it was made of, None for others.
    """

    source: str
    folder: Path
    sha256: dict[str, str]
    commit: str | None
    gguf: str | None = None


def folder_of(manifest: Path) -> Path:
    return manifest.with_name(FOLDER)


def read_fetched(manifest: Path) -> Fetched:
    """Read `source.json`.

    Raises InputError when the manifest is absent: nothing was fetched yet.
    """
    value = read_json(manifest, formats.SOURCE)
    sha256 = {Path(file["path"]).name: file["sha256"] for file in value["files"]}
    return Fetched(
        value["source"], folder_of(manifest), sha256, value.get("commit"), value.get("gguf", {}).get("sha256")
    )


def known(manifest: Path, source: str) -> Fetched | None:
    """Return what `manifest` says, if it is there and of this very `source`."""
    if not manifest.is_file():
        return None
    found = read_fetched(manifest)
    return found if found.source == source else None


def write_fetched(manifest: Path, source: str, sha256: Mapping[str, str], **more: Any) -> Path:
    """Write the manifest of the files of `folder_of(manifest)`.

    `more` are further entries, such as the commit.
    """
    folder = folder_of(manifest)
    files = [
        {"path": f"{FOLDER}/{name}", "size": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in sorted(sha256.items())
    ]
    remove_leftovers(manifest)
    write_json(manifest, {"format": formats.SOURCE, "source": source, "files": files, **more})
    return manifest


def clear(folder: Path, keep: Iterable[str] = ()) -> None:
    """Remove what an earlier source left in a fetched folder.

    A second set of weights there would be taken for the first.
    """
    kept = set(keep)
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()


def link(folder: Path, targets: Mapping[str, Path]) -> None:
    """Make `folder` hold exactly links of these names to these files."""
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder, keep=targets)
    for name, target in targets.items():
        path, temporary = folder / name, folder / f".{name}.{os.getpid()}.tmp"
        if path.is_symlink() and os.readlink(path) == str(target):
            continue
        temporary.symlink_to(target)
        os.replace(temporary, path)
