"""The files beside a manifest: a manifest in, those of them that are gone out. Snakemake looks at the manifest only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.files import read_json

_NAMES = ("file", "graph", "path")


def lost_files(manifest: str | os.PathLike) -> list[Path]:
    """The files that a manifest (assembly, engines, weights) names with a digest, and that are absent or of another size.

    A manifest that cannot be read is lost itself. Contents are not read: that is for whoever opens the files.
    """
    manifest = Path(manifest)
    try:
        value = read_json(manifest)
    except InputError:
        return [manifest]
    named = {manifest.parent / name: size for name, size in _named(value)}
    return sorted(path for path, size in named.items() if not path.is_file() or size not in (None, path.stat().st_size))


def _named(value: Any) -> Iterator[tuple[str, int | None]]:
    """(name, size or None) of each object that has a sha256 and a file name."""
    if isinstance(value, dict):
        if "sha256" in value:
            yield from ((value[key], value.get("size")) for key in _NAMES if isinstance(value.get(key), str))
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _named(item)
