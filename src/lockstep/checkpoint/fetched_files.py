"""The folder of a fetched checkpoint: links of its files, and nothing that an earlier source left."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


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
        path = folder / name
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        if path.is_symlink() and os.readlink(path) == str(target):
            continue
        temporary.symlink_to(target)
        os.replace(temporary, path)
