"""What changed since the lock, and whether that is bad.

A results tree and the lock of its model in; what differs between them, a line each, and what it means, out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.artifacts.reports import FAIL, PASS
from lockstep.errors import LockstepError
from lockstep.provenance.lock import TERMS, Lock, lock_path
from lockstep.provenance.lockfile import compared
from lockstep.report.verdict import NOT_RUN
from lockstep.targets import Results, Target

_LOCK, _NEW, _BUILT = "lock", "new", "built"
# By the first part of a place in the lock, the worst first: the colour, what has changed, whether that is bad.
_MEANING = {
    _LOCK: (FAIL, "The lock cannot be read", "Nothing has been compared with it."),
    "checkpoint": (FAIL, "The checkpoint has changed", "Bad unless it is meant: these are other weights or settings."),
    "reference": (FAIL, "The reference has changed", "Bad unless it is meant: transformers itself gives other tokens."),
    "golden": (FAIL, "The tokens have changed", "Bad unless it is meant: the engines give other tokens than locked."),
    TERMS: (NOT_RUN, "The settings of checks have changed", "A pass means something else now: compare them."),
    _BUILT: (
        NOT_RUN,
        "Weights, graphs or engines have changed",
        "Not bad where all checks pass: they were made differently, as after an upgrade.",
    ),
    _NEW: (PASS, "There are new results", "Not bad: nothing is locked of them yet; `lockstep lock` adds them."),
}
_AFTER = " A locked run refuses it. `lockstep explain TARGET` names the cause, `lockstep lock` accepts it."


@dataclass(frozen=True)
class Change:
    """One difference from a lock.

    line: where a result is, and "locked -> found". names: the precision, layers and backend of the result, without
    those that it has none of. kind: of `_MEANING`.
    """

    line: str
    names: Mapping[str, Any] = field(default_factory=dict)
    kind: str = _BUILT

    def is_of(self, target: Target) -> bool:
        """Return whether the result is this target's, alone or shared.

        It may be shared with other targets of its model.
        """
        names = {"precision": target.precision, "layers": target.layers, "backend": target.backend}
        return all(str(self.names.get(name, value)) == str(value) for name, value in names.items())


def meanings(changes: Sequence[Change]) -> list[tuple[str, str, str, list[str]]]:
    """Return what changes mean, the worst first: a verdict for the colour, two sentences, the lines of the changes."""
    said = []
    for kind, (result, what, meaning) in _MEANING.items():
        if lines := [change.line for change in changes if change.kind == kind]:
            after = _AFTER if kind not in (_LOCK, _NEW) else ""
            said.append((result, f"{what} ({len(lines)}).", meaning + after, lines))
    return said


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
        return [Change(str(error), kind=_LOCK)]
    changes = []
    for where, (section, comparison) in compared(results.root / model, lock).items():
        name = "/".join(where)
        kind = where[0] if where[0] in _MEANING else _BUILT
        lines = [f"{name}: {' / '.join(at)}: {change}" for at, change in comparison.changes]
        if not comparison.is_locked and not comparison.other_device:
            lines, kind = [f"{name}: not in the lock"], _NEW
        changes += [Change(line, section.key.names, kind) for line in lines]
    return changes
