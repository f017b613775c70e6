"""Files written whole or not at all, canonical JSON, and digests."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

# Key of a manifest under which the sha256 of its other entries stands: a flipped byte is seen by whoever reads it.
SEAL = "sealed_sha256"


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike, writer: str | None = None) -> Iterator[Path]:
    """Give a temporary path in the folder of `path`; on success it is flushed to disk and renamed to `path`, else removed.

    writer: what tells this writer's temporary file from others'; by default the process number, which is enough on one machine.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{writer or os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(path: str | os.PathLike) -> None:
    """Remove the temporary files for `path` of processes that were killed. Only where one machine at a time writes `path`:
    another machine's process would look dead here."""
    path = Path(path)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = leftover.name.removeprefix(f".{path.name}.").removesuffix(".tmp")
        if pid.isdecimal() and not _is_alive(int(pid)):
            leftover.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def dump_json(value: Any) -> str:
    """Canonical JSON: sorted keys, two spaces, newline at the end; refuses NaN and infinity."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as canonical JSON, whole or not at all. A manifest (an object with a "format") is sealed: `SEAL` is its digest."""
    if isinstance(value, dict) and "format" in value:
        value = {**value, SEAL: sha256_json({key: item for key, item in value.items() if key != SEAL})}
    write_bytes(path, dump_json(value).encode())


def read_json(path: str | os.PathLike, format: str | None = None) -> Any:
    """Read JSON; `format` is what its "format" key must say. A manifest is given without its seal.

    Raises InputError when the file is absent, is not JSON, has another format, or does not hold what was sealed.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: expected a file, found none; run the stage that makes it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected JSON, found {error}; delete the file and run again") from None
    found = value.get("format") if isinstance(value, dict) else None
    if format is not None and found != format:
        raise InputError(f"{path}: expected format {format!r}, found {found!r}; delete the file and run again")
    if found is not None and SEAL in value:
        seal = value.pop(SEAL)
        if seal != sha256_json(value):
            raise InputError(f"{path}: expected content of sha256 {seal}, found {sha256_json(value)}: the file is damaged; delete it and run again")
    return value


def sha256_file(path: str | os.PathLike) -> str:
    """Hex sha256 of the file's bytes."""
    with open(path, "rb") as file:
        return _file_digest(file).hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of the canonical JSON of `value`."""
    return hashlib.sha256(dump_json(value).encode()).hexdigest()


def _file_digest(file) -> Any:
    if hasattr(hashlib, "file_digest"):  # Python 3.11; the runtime supports 3.10 too
        return hashlib.file_digest(file, "sha256")
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest
