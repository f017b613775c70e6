"""Read what a user's checkpoint folder holds: nothing in it is trusted, and each fault is one line about that file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lockstep.errors import InputError


def present(path: Path) -> bool:
    """Whether `path` is a file, also through a link. A link to nowhere, as an interrupted hub download leaves it, is an error."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: expected a file, found a link to {os.readlink(path)}, which is absent; download the checkpoint again")
    return path.is_file()


def read_source_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises InputError when it is something else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise InputError(f"{path}: expected JSON, found {cut(str(error))}; download this file again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {shorten(value)}; download this file again")
    return value


def shorten(value: Any) -> str:
    """`repr` of something found in a damaged file, cut to fit on the one line of an error."""
    return cut(repr(value))


def cut(text: str) -> str:
    """`text`, or its beginning if it is long."""
    return text if len(text) <= 120 else text[:117] + "..."
