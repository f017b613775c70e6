"""Locked: what a step made against the lock, before anything is made from it. The first difference is named, with its cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import CheckError, InputError
from lockstep.lock.diff import changes, words
from lockstep.lock.lockfile import MADE, Section, lock_path, made_with, read_lock, section_at, sections
from lockstep.lock.record import record_path

# Recorded where a model comes from, and not compared: it may lie elsewhere.
_PLACES = ("source",)


def find_lock(model: str, folders: list[Path]) -> Path:
    """The lock of a model in the first of `folders` (each holding `locks/`) that has one. Raises InputError where none has."""
    for folder in folders:
        path = lock_path(folder / "locks", model)
        if path.is_file():
            return path
    places = " and ".join(str(folder / "locks") for folder in folders)
    raise InputError(f"locked: expected {model}.lock.json in {places}, found none; write it with `lockstep lock`, or run without locked")


def check_step(output: Path, lock_file: Path) -> None:
    """Raises CheckError, and takes the manifest `output` away, when the artefact is not the locked one."""
    section = section_at(output)
    if section is None:
        return
    line = difference(read_lock(lock_file), section)
    if line is not None:
        output.unlink()
        record_path(output).unlink()
        raise CheckError(f"{line}; locked by {lock_file}: undo the change, or run without locked and `lockstep lock` again")


def stale(results: Path, model: str, lock_file: Path) -> list[tuple[Path, str]]:
    """(manifest, difference) of each artefact in a results tree that is not the locked one: a locked run makes it again."""
    lock = read_lock(lock_file)
    found = [(section.manifest, difference(lock, section)) for section in sections(results, model)]
    return [(manifest, line) for manifest, line in found if line is not None]


def difference(lock: Mapping[str, Any], section: Section) -> str | None:
    """The first difference of an artefact from the lock, with what else differs that may have caused it; None when it is the same."""
    expected = expected_items(lock, section.where)
    if expected is None:
        return f"{section.stage}: {'/'.join(section.where)} is not in the lock"
    differing = next(changes(without_places(expected), without_places(section.items)), None)
    if differing is None:
        return None
    (name, *_), change = differing
    return f"{section.stage}: {name} differs: {_cause(lock, section) or change}"


def expected_items(lock: Mapping[str, Any], where: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The section of a lock; None where it has none."""
    place: Any = lock
    for name in where:
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def without_places(items: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in items.items() if name not in _PLACES}


def _cause(lock: Mapping[str, Any], section: Section) -> str:
    recorded, now = lock[MADE].get(section.stage), made_with(section.record)
    if recorded is None:
        return ""
    packages = [f"{where[-1]} {change}" for where, change in changes(recorded["packages"], now["packages"])]
    code = [f"code of the stage {words(recorded['code'])} -> {words(now['code'])}"] if recorded["code"] != now["code"] else []
    return ", ".join([*packages, *code])
