"""The changes that `lockstep lock` makes to a lock, and which of them make a check looser."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.provenance.lock import (
    ABSENT,
    ENGINES,
    PARAMETERS,
    Lock,
    Place,
    change,
    collect,
    config_of,
    differences,
    is_absent,
    kind_of,
    without_origin,
)
from lockstep.stages import STAGES

_EARLIER = "lockstep.lock/4"  # of Lockstep 0.2: the same, with a place for each CPU that engines were built on
_BOUNDS = "tolerance"  # numbers below this key are largest allowed errors; all others are amounts that are checked


@dataclass(frozen=True)
class LockUpdate:
    """A lock that is to be written.

    changes: a line for each place that it adds or drops, and for each digest, token and parameter of a check that it
    changes. looser: those of these lines that accept results which the old lock rejects.
    """

    lock: Lock
    changes: tuple[str, ...] = ()
    looser: tuple[str, ...] = ()


def updated_lock(results: Path, model: str, out: Path) -> LockUpdate:
    """Return the lock of the finished model `model`, and its changes to the one at `out`, where there is one.

    Entries that the machine of `results` cannot make stay as locked, as long as they are of the same graphs: engines of
    other devices, and checks of engines that do not run there. Raises InputError where an artefact or a check is
    missing.
    """
    lock = collect(results, model)
    if not out.is_file():
        return LockUpdate(lock)
    # A lock of the previous version is still read: only this update moves its entries to the new places.
    form = formats.LOCK
    if f'"{_EARLIER}"'.encode() in out.read_bytes():
        form = _EARLIER
    before = Lock.load(out, form)
    lock = replace(keep_not_run(before, lock, config_of(results).not_run()), published=before.published)
    changes: list[str] = []
    looser: list[str] = []
    for where in sorted(before.entries.keys() | lock.entries.keys()):
        old = before.entries.get(where)
        new = lock.entries.get(where)
        if old is None:
            changes.append(f"added {where}")
        elif new is None:
            looser.append(f"dropped {where}")
            changes.append(looser[-1])
        else:
            for at, old_value, new_value in differences(without_origin(old), without_origin(new)):
                line = f"changed {where}: {'.'.join(at)} {change(old_value, new_value)}"
                if _is_of_check(where) and is_looser(at, old_value, new_value):
                    line += ", which is looser"
                    looser.append(line)
                changes.append(line)
    return LockUpdate(lock, tuple(changes), tuple(looser))


def is_looser(where: tuple[str, ...], before: Any, after: Any) -> bool:
    """Return whether a change of a check's parameter accepts results that were rejected before.

    A larger bound is looser. A smaller number of another kind (limits, lengths, tokens, seconds) is looser, but for a
    seed. A removed prompt, expected text or entry is looser; a changed text or a new entry is not.
    """
    if before is ABSENT or before is None or (where[-1:] == ("seed",) and after is not ABSENT):
        return False
    if _is_number(before) and _is_number(after):
        if _BOUNDS in where:
            return bool(after > before)
        return bool(after < before)
    if _BOUNDS in where or _is_number(before):
        return True
    return after is ABSENT or not after


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_of_check(where: Place) -> bool:
    """Return whether a place has parameters of a check, or the expected tokens of engines."""
    kind = where.partition("/")[0]
    return kind == PARAMETERS or (kind in STAGES and STAGES[kind].is_check)


def keep_not_run(before: Lock, lock: Lock, not_run: Collection[str]) -> Lock:
    """Return `lock` with the entries of `before` that this machine cannot make, as long as graphs are the same.

    These are engines of other devices, and, where engines are not run here (`Config.not_run`), their golden tokens and
    parameters of checks, what made them, and the engines where they are not built either.
    """
    built = {kind_of(where) for where in lock.entries if where.startswith(f"{ENGINES}/")}
    precisions = _same_graphs(before, lock)
    kept = {}
    for where, items in before.entries.items():
        is_kept = kind_of(where) in built or is_absent(where, not_run)
        # An earlier lock's place of a CPU, `.../x86_64 0123456789ab`, goes where the new lock has `.../x86_64`.
        if is_kept and precisions.intersection(where.split("/")) and where.partition(" ")[0] not in lock.entries:
            kept[where] = items
    backends = tuple(f"/{name.rpartition('/')[2]}" for name in not_run)
    made_with = {name: value for name, value in before.made_with.items() if name.endswith(backends)}
    return replace(lock, entries={**kept, **lock.entries}, made_with={**made_with, **lock.made_with})


def _same_graphs(before: Lock, lock: Lock) -> set[str]:
    """Return the precisions whose graphs are the same in both."""
    precisions = set()
    for where, items in before.entries.items():
        kind, _, precision = where.partition("/")
        if kind == "graphs" and items == lock.entries.get(where):
            precisions.add(precision)
    return precisions
