"""What changed since the lock: a results tree and the lock of its model in; what differs between them, a line each,
out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.provenance.diff import changes
from lockstep.provenance.locked import expected_items, without_places
from lockstep.provenance.lockfile import lock_path, read_lock, sections_of
from lockstep.provenance.record import records
from lockstep.targets import Results


def since_lock(results: Results, models: Iterable[str], locks: Path) -> dict[str, list[str]]:
    """Lines by model: where a result is, and "locked -> found". Models without a lock in `locks` are left out.

    What is locked and not there yet is no change: the table of targets says what has not run.
    """
    return {
        model: _changes(results, model, lock_path(locks, model))
        for model in dict.fromkeys(models)
        if lock_path(locks, model).is_file()
    }


def _changes(results: Results, model: str, lock_file: Path) -> list[str]:
    try:
        lock = read_lock(lock_file)
    except LockstepError as error:
        return [str(error)]
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for path in records(results.root / model):
        try:
            found |= {section.where: section.items for section in sections_of(path)}
        except (LockstepError, OSError):
            continue  # damaged, or being made: the check that reads it says so
    lines = []
    for where, items in sorted(found.items()):
        name, expected = " / ".join(where), expected_items(lock, where)
        if expected is None:
            lines.append(f"{name}: not in the lock")
        else:
            differing = changes(without_places(expected), without_places(items))
            lines += [f"{name}: {' / '.join(at)}: {change}" for at, change in differing]
    return lines
