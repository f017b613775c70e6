"""Read files of a user's checkpoint folder. They are untrusted; each error is one line about the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.config.model_config import parse_json
from lockstep.errors import InputError, truncate

# The limit of safetensors' own headers. The largest published tokenizer.json has 35 MB.
MAX_JSON_BYTES = 100_000_000
_TEXTS = (".txt", ".jinja")
LFS_POINTER = b"version https://git-lfs"


def present(path: Path) -> bool:
    """Return whether `path` is a file, also through a link.

    Raises InputError for a broken link, as of an interrupted hub download.
    """
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{path}: expected a file, found a link to {os.readlink(path)}, which is absent; "
            f"download the checkpoint again"
        )
    return path.is_file()


def read_source_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`, in UTF-8 as transformers does. Raises InputError when it is something else."""
    text = read_source_text(path)
    if text.startswith(LFS_POINTER.decode()):
        raise InputError(f"{path}: expected JSON, found a Git LFS pointer; run `git lfs pull` in its folder")
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, found {truncate(str(error))}; download this file again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {shorten(value)}; download this file again")
    return value


def check_side_file(path: Path) -> None:
    """Raise InputError for a file of config or tokenizer that is not a JSON object, or not text in UTF-8."""
    if path.suffix == ".json":
        read_source_json(path)
    elif path.suffix in _TEXTS:
        read_source_text(path)


def read_source_text(path: Path) -> str:
    """Read the text in `path`. Raises InputError when it is not UTF-8, or very large."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise InputError(
            f"{path}: expected a file of at most {MAX_JSON_BYTES} bytes, found {size}; download this file again"
        )
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected text in UTF-8, found {truncate(str(error))}; download this file again"
        ) from None


def shorten(value: Any) -> str:
    return truncate(repr(value))
