"""The files beside a manifest: a manifest in, its files and those of them that are gone out. Snakemake looks at the manifest only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep import formats
from lockstep.errors import InputError
from lockstep.files import read_json
from lockstep.seen import Expected

_NAMES = ("file", "graph", "path")


def lost_files(manifest: str | os.PathLike) -> list[Path]:
    """The files that a manifest (assembly, engines, weights) names with a digest, and that are absent or of another size.

    A manifest that cannot be read is lost itself. Contents are not read: that is for whoever opens the files.
    """
    manifest = Path(manifest)
    try:
        files = {file.path: file for file in named_files(manifest)}
    except InputError:
        return [manifest]
    return sorted(path for path, file in files.items() if not path.is_file() or file.size not in (None, path.stat().st_size))


def named_files(manifest: str | os.PathLike) -> list[Expected]:
    """The files that a manifest names with a digest, each once. Raises InputError for a manifest that cannot be read.

    A checkpoint's lie in the folder that it names, those of others are relative to the manifest.
    """
    manifest = Path(manifest)
    value = read_json(manifest)
    folder = manifest.parent
    if isinstance(value, dict) and value.get("format") == formats.CHECKPOINT:
        folder = folder / value["folder"]
    found = {name: Expected(folder / name, sha256, size) for name, sha256, size in _named(value)}
    return [found[name] for name in sorted(found)]


def _named(value: Any) -> Iterator[tuple[str, str, int | None]]:
    """(name, sha256, size or None) of each object that has a sha256 and a file name."""
    if isinstance(value, dict):
        if isinstance(value.get("sha256"), str):
            yield from ((value[key], value["sha256"], value.get("size")) for key in _NAMES if isinstance(value.get(key), str))
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _named(item)
