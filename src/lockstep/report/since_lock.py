"""What changed since the lock: a line for each difference, and its meaning, of a results tree and a lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lockstep.artifacts.reports import FAIL, PASS
from lockstep.errors import LockstepError
from lockstep.provenance.lock import PARAMETERS, Lock, compared, lock_path
from lockstep.report.verdict import NOT_RUN
from lockstep.targets import Results

Changes = Mapping[str, Sequence[str]]  # {kind, of `_MEANING`: lines of a place and "locked -> found"}
_LOCK = "lock"
_NEW = "new"
_BUILT = "built"
# {first part of a place in the lock: (colour, change, whether it is bad)}, the worst first.
_MEANING = {
    _LOCK: (FAIL, "The lock cannot be read", "Nothing has been compared with it."),
    "checkpoint": (FAIL, "The checkpoint has changed", "Bad unless intended: these are other weights or settings."),
    "reference": (FAIL, "The reference has changed", "Bad unless intended: transformers itself gives other tokens."),
    "golden": (FAIL, "The tokens have changed", "Bad unless intended: the engines give other tokens than locked."),
    PARAMETERS: (NOT_RUN, "The settings of checks have changed", "A pass means something else now: compare them."),
    _BUILT: (
        NOT_RUN,
        "Weights, graphs or engines have changed",
        "Not bad where all checks pass: they were made differently, as after an upgrade.",
    ),
    _NEW: (PASS, "There are new results", "Not bad: nothing is locked of them yet."),
}


def meanings(changes: Changes) -> list[tuple[str, str, str, Sequence[str]]]:
    """Return (verdict for the colour, heading, meaning, lines) for each kind of change, the worst first."""
    return [
        (result, f"{what} ({len(changes[kind])}).", meaning, changes[kind])
        for kind, (result, what, meaning) in _MEANING.items()
        if kind in changes
    ]


def changes_since_lock(results: Results, models: Iterable[str], locks: Path) -> dict[str, Changes]:
    """Return {model: changes} for models with a lock in `locks`.

    A locked result that does not exist yet is no change: the table of targets shows it as not run.
    """
    lock_files = {model: lock_path(locks, model) for model in models}
    return {model: _changes(results, model, path) for model, path in lock_files.items() if path.is_file()}


def _changes(results: Results, model: str, lock_file: Path) -> Changes:
    try:
        lock = Lock.load(lock_file)
    except LockstepError as error:
        return {_LOCK: [str(error)]}
    changes: dict[str, list[str]] = {}
    for where, comparison in compared(results.root / model, lock).items():
        kind = where.partition("/")[0]
        if kind not in _MEANING:
            kind = _BUILT
        for keys, change in comparison.changes:
            changes.setdefault(kind, []).append(f"{where}: {' / '.join(keys)}: {change}")
        if not comparison.is_locked:
            changes.setdefault(_NEW, []).append(f"{where}: not in the lock")
    return changes
