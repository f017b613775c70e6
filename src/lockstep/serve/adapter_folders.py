"""The folders that requests may name as adapters, and those that are loaded.

`--allow-adapter-loading` names the folder that they lie in.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.adapters import CONFIG, WEIGHTS
from lockstep.serve.bodies import BadRequest

MOST_LOADED = 256
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class LoadedFolder:
    """A loaded adapter's folder, and what its files were then.

    stamp: of its files; sha256: of what the adapter computes.
    """

    folder: Path
    stamp: Stamp | None
    sha256: str


class AdapterFolders:
    """The adapter folders below `root`.

    loaded: the loaded ones by name, the least recently used first.
    """

    def __init__(self, root: Path):
        self._root = root.resolve()
        self.loaded: dict[str, LoadedFolder] = {}

    def find(self, text: str) -> tuple[str, Path]:
        """Return the name and the path of the folder that a request names.

        A request names it by its path, or relative to the root; its name is its path below the root. Raises BadRequest
        for one elsewhere: links are followed first.
        """
        try:
            folder = (self._root / text).resolve()
        except (OSError, ValueError, RuntimeError):
            folder = self._root
        if self._root not in folder.parents:
            raise BadRequest(
                "lora: expected the name of an adapter, or a folder below that of --allow-adapter-loading, found "
                f"{text[:80]!r}",
                "lora",
                403,
            )
        name = folder.relative_to(self._root).as_posix()
        check_name("lora", name)
        return name, folder

    def name_of(self, text: str) -> str | None:
        """Return the name of a loaded folder, as `find` gives it; None for another."""
        if text in self.loaded:
            return text
        name, _ = self.find(text)
        return name if name in self.loaded else None

    def use(self, name: str) -> None:
        """Mark a loaded adapter as the most recently used.

        Raises BadRequest, 409, where its folder is not as it was.
        """
        entry = self.loaded.pop(name)
        self.loaded[name] = entry
        if stamp_of(entry.folder) != entry.stamp:
            raise BadRequest(
                f"lora: adapter {name!r}: expected its folder as it was when it was loaded, found it changed or gone; "
                "unload it (POST /v1/unload_lora_adapter), or put it back",
                "lora",
                409,
            )


def check_name(field: str, name: str) -> None:
    """Raise BadRequest for what cannot be part of a model's name."""
    if len(name) > 200 or not _NAME.fullmatch(name):
        raise BadRequest(f"{field}: expected letters, digits, . _ - and /, found {name[:80]!r}", field)


def stamp_of(folder: Path) -> Stamp | None:
    """Return a value that changes when a file of the adapter does.

    None where a file is gone.
    """
    try:
        found = [os.stat(folder / name) for name in (CONFIG, WEIGHTS)]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
