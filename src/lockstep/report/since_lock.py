"""What changed since the lock.

A results tree and the lock of its model in; what differs between them, a line each, out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.provenance.lock import Lock, lock_path
from lockstep.provenance.lockfile import readable_sections
from lockstep.targets import Results, Target


@dataclass(frozen=True)
class Change:
    """One difference from a lock.

    line: where a result is, and "locked -> found". names: the precision, layers and backend of the result, without
    those that it has none of.
    """

    line: str
    names: Mapping[str, Any] = field(default_factory=dict)

    def is_of(self, target: Target) -> bool:
        """Return whether the result is this target's, alone or shared.

        It may be shared with other targets of its model.
        """
        own = {"precision": target.precision, "layers": target.layers, "backend": target.backend}
        return all(str(self.names.get(name, value)) == str(value) for name, value in own.items())


def since_lock(results: Results, models: Iterable[str], locks: Path) -> dict[str, list[Change]]:
    """Return what changed, by model.

    Models without a lock in `locks` are left out. What is locked and not there yet is no change: the table of targets
    says what has not run.
    """
    return {
        model: _changes(results, model, lock_path(locks, model))
        for model in dict.fromkeys(models)
        if lock_path(locks, model).is_file()
    }


def _changes(results: Results, model: str, lock_file: Path) -> list[Change]:
    try:
        lock = Lock.load(lock_file)
    except LockstepError as error:
        return [Change(str(error))]
    made = []
    for where, section in sorted(readable_sections(results.root / model).items()):
        name, compared = "/".join(where), lock.compare(where, section.items)
        lines = [f"{name}: {' / '.join(at)}: {change}" for at, change in compared.changes]
        if not compared.is_locked and not compared.other_device:
            lines = [f"{name}: not in the lock"]
        made += [Change(line, section.key.names) for line in lines]
    return made
