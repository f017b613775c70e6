"""What `lockstep lock` changes in a lock, and which of these changes make a check looser.

A finished results tree and the lock before it in; the lock that is to be written, and a line for each change, out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.provenance.diff import ABSENT, change, differences
from lockstep.provenance.lock import ENGINES, TERMS, Lock, Place, is_absent, kind_of, split, without_places
from lockstep.provenance.lockfile import collect, config_of
from lockstep.stages import STAGES

_EARLIER = "lockstep.lock/4"  # of Lockstep 0.2: the same, with a place for each CPU that engines were built on
_BOUNDS = "tolerance"  # below it are the largest errors that pass; all other numbers are how much is checked


@dataclass(frozen=True)
class LockUpdate:
    """A lock that is to be written.

    changes: a line for each place that it adds to and drops from the one before it, and for each digest, token and
    parameter of a check that is another. looser: those of these lines that let pass what the lock before it refuses.
    """

    lock: Lock
    changes: tuple[str, ...] = ()
    looser: tuple[str, ...] = ()


def updated_lock(results: Path, model: str, out: Path) -> LockUpdate:
    """Return the lock of the finished model `model`, and what it changes in the one at `out`, where there is one.

    What the machine of `results` does not make stays as it is locked, as long as it is of the same graphs: engines of
    other devices, and checks of engines that do not run there. Raises InputError where something was not made or not
    checked yet.
    """
    lock = collect(results, model)
    if not out.is_file():
        return LockUpdate(lock)
    is_earlier = f'"{_EARLIER}"'.encode() in out.read_bytes()
    before = Lock.load(out, _EARLIER if is_earlier else formats.LOCK)
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
            for at, old_value, new_value in differences(without_places(old), without_places(new)):
                line = f"changed {where}: {'.'.join(at)} {change(old_value, new_value)}"
                if _is_of_check(where) and is_looser(at, old_value, new_value):
                    line += ", which is looser"
                    looser.append(line)
                changes.append(line)
    return LockUpdate(lock, tuple(changes), tuple(looser))


def is_looser(where: tuple[str, ...], before: Any, after: Any) -> bool:
    """Return whether a change at a place of a check's terms lets pass what did not pass before.

    A bound is looser where it is larger, and where one is given that was measured (None) or the other way round, for
    nobody can compare these. Any other number (limits, lengths, tokens, seconds) is looser where it is smaller, but for
    a seed, of which none is. A prompt, an expected text or an entry that is gone is looser; another text is not, nor is
    a new entry.
    """
    if before is ABSENT or (where[-1:] == ("seed",) and after is not ABSENT):
        return False
    if _is_number(before) and _is_number(after):
        return bool(after > before) if _BOUNDS in where else bool(after < before)
    if _BOUNDS in where or _is_number(before):
        return True
    return after is ABSENT or not after


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_of_check(where: Place) -> bool:
    """Return whether a place holds parameters of a check, or the tokens that engines must give."""
    kind = split(where)[0]
    return kind == TERMS or (kind in STAGES and STAGES[kind].is_check)


def keep_not_run(before: Lock, lock: Lock, not_run: Collection[str]) -> Lock:
    """Return `lock` with the entries of `before` that this machine does not make, as long as graphs are the same.

    These are engines of other devices, and, where engines are not run here (`Config.not_run`), their golden tokens and
    parameters of checks, what made them, and the engines where they are not built either.
    """
    built = {kind_of(where) for where in lock.entries if split(where)[0] == ENGINES}
    precisions = _same_graphs(before, lock)
    old_entries = {
        where: items
        for where, items in before.entries.items()
        if precisions.intersection(split(where))
        and (kind_of(where) in built or is_absent(where, not_run))
        and where.partition(" ")[0] not in lock.entries  # a CPU's in an earlier lock: `x86_64 0123456789ab`
    }
    ends = tuple(f"/{name.rpartition('/')[2]}" for name in not_run)
    made_with = {name: value for name, value in before.made_with.items() if name.endswith(ends)}
    return replace(lock, entries={**old_entries, **lock.entries}, made_with={**made_with, **lock.made_with})


def _same_graphs(before: Lock, lock: Lock) -> set[str]:
    """Return the precisions whose graphs are the same in both."""
    return {
        split(where)[1]
        for where, items in before.entries.items()
        if split(where)[0] == "graphs" and items == lock.entries.get(where)
    }
