"""The folder of a fetched checkpoint, which has links of its files and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def clear(folder: Path, keep: Iterable[str] = ()) -> None:
    """Remove an earlier source's files from a fetched folder: its weights could be used instead of the new ones."""
    names = set(keep)
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()


def link(folder: Path, targets: Mapping[str, Path]) -> None:
    """Make `folder` contain exactly links with these names to these files."""
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder, keep=targets)
    for name, target in targets.items():
        path = folder / name
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        if path.is_symlink() and os.readlink(path) == str(target):
            continue
        temporary.symlink_to(target)
        os.replace(temporary, path)
