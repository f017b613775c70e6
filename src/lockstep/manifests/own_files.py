"""Whose the files beside a manifest are.

In: a manifest's path, and the names of files that are to be written beside it. Out: those of an earlier manifest there
that are then stale, or one line about a file of someone else. A file beside a manifest is its own if it names it, or
if the list does that `replacing` keeps while the files are written: a process that is killed leaves files and list.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import write_json
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import named_files


@contextlib.contextmanager
def replacing(manifest: Path, names: Collection[str]) -> Iterator[list[Path]]:
    """While the files `names` beside `manifest`, and then it, are written: keep a list of them there.

    Yields the stale files of an earlier one, as `stale_files`, whose errors are raised. Where the body fails,
    the files go that no manifest names.
    """
    stale = stale_files(manifest, names)
    write_json(_list_beside(manifest), sorted(names))
    try:
        yield stale
    except BaseException:
        for name in set(names) - _strings(manifest):
            manifest.with_name(name).unlink(missing_ok=True)
        raise
    finally:
        _list_beside(manifest).unlink(missing_ok=True)


def stale_files(manifest: Path, names: Collection[str]) -> list[Path]:
    """Return the files beside `manifest` that it names and that are not among `names`.

    names: of the files that are to be written there. Raises InputError for one of them that is there and that the
    manifest does not name: it would be lost.
    """
    own = _own(manifest)
    known = _strings(manifest) | _strings(_list_beside(manifest))
    for name in sorted(names):
        path = manifest.with_name(name)
        if name not in known and (path.is_file() or path.is_symlink()):  # a folder is refused where it is written
            raise InputError(
                f"{path}: expected to write a file here, found one that no earlier {manifest.name} names; choose a "
                "folder of its own, or delete the file"
            )
    return [manifest.with_name(name) for name in sorted(own - set(names)) if manifest.with_name(name).is_file()]


def clear_unnamed(manifest: Path, is_left: Callable[[Path], bool]) -> None:
    """Delete what stages that were killed left beside `manifest`, in a folder that is theirs alone.

    is_left: whether a file that the manifest does not name is one of theirs. Temporary files and folders are.
    """
    kept = _own(manifest) | {manifest.name}
    if not manifest.parent.is_dir():
        return
    for path in sorted(manifest.parent.iterdir()):
        is_temporary = path.name.startswith(".") and path.name.endswith(".tmp")
        if path.is_dir() and is_temporary:
            shutil.rmtree(path)
        elif path.is_file() and path.name not in kept and (is_temporary or is_left(path)):
            path.unlink()


def _own(manifest: Path) -> set[str]:
    """Return the names of the files beside `manifest` that it names; none where it cannot be read."""
    try:
        found = named_files(manifest)
    except InputError:
        return set()
    return {file.path.name for file in found if file.path.parent == manifest.parent}


def _list_beside(manifest: Path) -> Path:
    return manifest.with_name(f".{manifest.name}.files.tmp")


def _strings(path: Path) -> set[str]:
    """Return all strings of a JSON document; none where it cannot be read.

    So files are also known that a manifest names which is of another version, or was edited.
    """

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from walk(item)

    try:
        return set(walk(json.loads(path.read_bytes())))
    except (OSError, ValueError, RecursionError):
        return set()
