"""The files in a manifest's folder that belong to it.

Before new files are written there, those of an earlier manifest are stale, and any other file of the same name is an
error. A file belongs to a manifest that names it, or whose list of files being written (`replacing`) does: a process
that is killed leaves both the files and that list.
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
    """Keep a list of the files that the body writes to the manifest's folder, until it has written the manifest.

    Yields the stale files of an earlier manifest, and raises, as `stale_files`. Where the body fails, files that no
    manifest names are deleted.
    """
    stale = stale_files(manifest, names)
    write_json(_list_of_writes(manifest), sorted(names))
    try:
        yield stale
    except BaseException:
        for name in set(names) - _strings(manifest):
            manifest.with_name(name).unlink(missing_ok=True)
        raise
    finally:
        _list_of_writes(manifest).unlink(missing_ok=True)


def stale_files(manifest: Path, names: Collection[str]) -> list[Path]:
    """Return the files in the manifest's folder that it names and that are not among `names`.

    names: of the files that will be written there. Raises InputError where one of them exists and the manifest does not
    name it: it would be lost.
    """
    own_files = _own_files(manifest)
    own_names = _strings(manifest) | _strings(_list_of_writes(manifest))
    for name in sorted(names):
        path = manifest.with_name(name)
        # A folder is not checked for: writing to it fails by itself.
        if name not in own_names and (path.is_file() or path.is_symlink()):
            raise InputError(
                f"{path}: expected to write a file here, found one that no earlier {manifest.name} names; choose "
                "another folder, or delete the file"
            )
    stale = [manifest.with_name(name) for name in sorted(own_files - set(names))]
    return [path for path in stale if path.is_file()]


def clear_unnamed(manifest: Path, is_left: Callable[[Path], bool]) -> None:
    """Delete what killed stages left in the folder of a manifest, which no other program writes to.

    is_left: whether a file that the manifest does not name is of such a stage. Temporary files and folders are.
    """
    current = _own_files(manifest) | {manifest.name}
    if not manifest.parent.is_dir():
        return
    for path in sorted(manifest.parent.iterdir()):
        is_temporary = path.name.startswith(".") and path.name.endswith(".tmp")
        if path.is_dir() and is_temporary:
            shutil.rmtree(path)
        elif path.is_file() and path.name not in current and (is_temporary or is_left(path)):
            path.unlink()


def _own_files(manifest: Path) -> set[str]:
    """Return the names of the files in its folder that a manifest names; none where it cannot be read."""
    try:
        files = named_files(manifest)
    except InputError:
        return set()
    return {file.path.name for file in files if file.path.parent == manifest.parent}


def _list_of_writes(manifest: Path) -> Path:
    return manifest.with_name(f".{manifest.name}.files.tmp")


def _strings(path: Path) -> set[str]:
    """Return all strings of a JSON document, of which some are file names; none where it cannot be read.

    Where the file names stand is not asked: the manifest may be of another version, or edited.
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
