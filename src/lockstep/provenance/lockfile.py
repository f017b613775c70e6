"""Writing of locks: a finished results tree in, `locks/<model>.lock.json` out.

The file is sorted, and to be committed. A lock is made of sections: what each artefact must be, by name, and on what
terms each check was passed. A section comes from the manifest of the artefact and from the record of how it was made.
Beside the sections stands, by stage, what made them (code, packages, library): it decides nothing, and names the cause
where an artefact differs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.files import dump_json, read_json, sha256_json
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.manifests.manifest_files import manifest_entries
from lockstep.provenance.diff import changes
from lockstep.provenance.lock import ENGINES, TERMS, Comparison, Lock, Maker, Place, split
from lockstep.provenance.record import SUFFIX, checked_record, read_record, record_path, records
from lockstep.stages import STAGES, jobs
from lockstep.targets import Results


@dataclass(frozen=True)
class Section:
    """An artefact, or the terms of a check, as a lock holds it.

    where: its place in the lock. key: its build key. items: what it must be, by name.
    """

    where: Place
    key: BuildKey
    items: Mapping[str, Any]

    @property
    def stage(self) -> str:
        return self.key.stage


def write_lock(results: Path, model: str, out: Path, renew: bool = False) -> list[str]:
    """Write the lock of the finished model `model` to `out`, and return in words what became of an earlier one.

    Engines of other devices that are locked already stay; so does all of engines that are not built here because this
    processor does not compute in their precision. renew: drop them where they are of other graphs.

    Raises InputError where something was not made or not checked yet, and CheckError where engines would be dropped
    without `renew`.
    """
    lock, lines = collect(results, model), []
    if out.is_file():
        before = Lock.load(out)
        lock = replace(_with_kept(before, lock), published=before.published)
        lost = _devices_of_other_graphs(before, lock)
        if lost and not renew:
            precision = next(iter(lost))
            old, new = (of.sections.get(f"graphs/{precision}", {}) for of in (before, lock))
            changed = [(".".join(at), change) for at, change in changes(old, new)]
            (name, change), *_ = sorted(changed, key=lambda pair: not pair[0].endswith(".onnx"))
            devices = ", ".join(sorted(set().union(*lost.values())))
            raise CheckError(
                f"{out}: expected the locked graphs of {', '.join(lost)}, found others ({name} {change}), and engines "
                f"for the locked ones of {devices}, which only that device can build; take back the change, or drop "
                "these engines with --renew"
            )
        lines = _changes(before, lock)
    lock.save(out)
    return lines


def _same_graphs(before: Lock, lock: Lock) -> set[str]:
    """Return the precisions whose graphs are the same in both."""
    return {
        split(where)[1]
        for where, items in before.sections.items()
        if split(where)[0] == "graphs" and items == lock.sections.get(where)
    }


def _devices_of_other_graphs(before: Lock, lock: Lock) -> dict[str, set[str]]:
    """Return by precision the devices whose locked engines are of graphs that `lock` has no more."""
    lost: dict[str, set[str]] = {}
    same = _same_graphs(before, lock)
    for where in sorted(before.sections.keys() - lock.sections.keys()):
        kind, *names = split(where)
        if kind == ENGINES and f"graphs/{names[0]}" in lock.sections and names[0] not in same:
            lost.setdefault(names[0], set()).add(names[-1])
    return lost


def _changes(before: Lock, lock: Lock) -> list[str]:
    """Return a line for what `lock` adds to and drops from the one before it."""
    old, new = before.sections.keys(), lock.sections.keys()
    kept = {split(where)[-1] for where in old & new if split(where)[0] == ENGINES}
    lines = [
        f"{what} {where}" for what, places in (("added", new - old), ("dropped", old - new)) for where in sorted(places)
    ]
    return [*lines, *([f"kept the engines of {', '.join(sorted(kept))}"] if lines and kept else [])]


def _with_kept(before: Lock, lock: Lock) -> Lock:
    """Return `lock` with what it keeps of `before`, as long as that is of the same graphs.

    Engines of other devices; and of engines that are not built here, for this processor does not compute in their
    precision, their golden tokens, parameters of checks and makers too.
    """
    from lockstep.config.backends import backends  # loads pydantic, which verify does without

    def kinds(of: Lock) -> set[tuple[str, str]]:
        places = map(split, of.sections)
        return {(place[1], place[2]) for place in places if place[0] == ENGINES}

    here, same = kinds(lock), _same_graphs(before, lock)
    known = [(precision, backend) for precision, backend in kinds(before) - here if backend in backends()]
    absent = [pair for pair in known if pair[0] in same and backends()[pair[1]].lacks_here(pair[0])]
    kept = {
        where: items
        for where, items in before.sections.items()
        if ((place := split(where))[0] == ENGINES and tuple(place[1:3]) in here and place[1] in same)
        or any({*pair} <= {*place} for pair in absent)
    }
    ends = tuple(f"/{backend}" for _, backend in absent)
    makers = {name: maker for name, maker in before.makers.items() if name.endswith(ends)}
    return replace(lock, sections={**kept, **lock.sections}, makers={**makers, **lock.makers})


def collect(results: Path, model: str) -> Lock:
    """Return the lock of what is there. Raises InputError for a model that is not finished."""
    from lockstep.config.load import load  # loads pydantic, which verify does without

    tree = Results(results)
    config = load(read_json(tree.config()), where=str(tree.config()))
    # Of several devices each machine has its own.
    built = [
        target
        for target in config.targets()
        if target.model == model and tree.engines(model, target.precision, target.backend).is_file()
    ]
    if not built:
        raise InputError(
            f"{results / model}: expected a model of {tree.config()}, found no engines of one; run its config first"
        )
    pinned = list(sections(results, model))
    made = {section.stage for section in pinned}
    for stage in dict.fromkeys(job.stage for job in jobs(config, results, built)):
        if STAGES[stage].is_locked and stage not in made:
            raise InputError(
                f"{results / model}: expected a finished model, found nothing of {stage}; run `lockstep run` first"
            )
    return lock_of(model, pinned)


def lock_of(model: str, pinned: Iterable[Section]) -> Lock:
    pinned = list(pinned)
    makers = {maker(section.key): made_with(section.key) for section in pinned}
    return Lock(model, makers, {section.where: section.items for section in pinned})


def maker(key: BuildKey) -> str:
    """Return the name that a lock has for what made an artefact. The stage, and the backend where one runs it."""
    return "/".join([key.stage, *([key.names["backend"]] if "backend" in key.names else [])])


def made_with(key: BuildKey) -> Maker:
    """Return the code, packages and library of a stage, as a lock holds them."""
    backend = {name: value for name, value in (key.backend or {}).items() if name not in ("name", "device")}
    return Maker(
        sha256_json(key.code),
        key.environment,
        None if STAGES[key.stage].is_check else json.loads(dump_json(key.options)),
        json.loads(dump_json(backend)) if backend else None,
    )


def terms_place(stage: str, names: Mapping[str, Any]) -> Place:
    """Return where the terms of a check stand in the lock of its model.

    names: precision, layers and backend, those that the stage has.
    """
    return "/".join([TERMS, stage, *(str(names[key]) for key in ("precision", "layers", "backend") if key in names)])


def terms(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that the config says to a check, as a lock holds it.

    Tolerances, prompts, lengths, limits, expected texts.
    """
    return _numbered(json.loads(dump_json(options)))


def _numbered(value: Any) -> Any:
    """Return a value with its lists as mappings by number. What differs in them then has a place too."""
    if isinstance(value, Mapping):
        return {name: _numbered(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"{number:03d}": _numbered(item) for number, item in enumerate(value)}
    return value


def sections(results: Path, model: str) -> Iterator[Section]:
    """Yield the sections of all locked artefacts of a model, in order of their paths."""
    for path in records(results / model):
        yield from sections_of(path)


def readable_sections(folder: Path) -> dict[Place, Section]:
    """Return the sections below a model's folder by place, in order, without those that are damaged or being made."""
    there: dict[Place, Section] = {}
    for path in records(folder):
        with contextlib.suppress(LockstepError, OSError):
            there |= {section.where: section for section in sections_of(path)}
    return dict(sorted(there.items()))


def compared(folder: Path, lock: Lock) -> dict[Place, Comparison]:
    """Compare the artefacts below a model's folder with its lock, by place."""
    return {where: lock.compare(where, section.items) for where, section in readable_sections(folder).items()}


def sections_of(path: Path) -> list[Section]:
    """Return the sections of the record at `path`.

    There are none for what is not locked, such as a report. Raises InputError or CheckError when record and manifest
    are damaged or do not belong together.
    """
    key = checked_record(path).key
    manifest = path.with_name(f"{path.name.removesuffix(SUFFIX)}.json")
    entry = STAGES.get(key.stage)
    if entry is None or not entry.is_locked:
        return []
    if read_record(manifest) is None:
        raise CheckError(
            f"{manifest}: expected the file that {path.name} is of, found "
            f"{'another' if manifest.is_file() else 'none'}; delete it and run again"
        )
    pinned = []
    if entry.is_pinned:
        with manifest_entries(manifest):
            where, items = entry.pin(manifest, key)
        pinned.append(Section("/".join(where), key, items))
    if entry.is_check:
        pinned.append(Section(terms_place(key.stage, key.names), key, terms(key.options)))
    return pinned


def sections_at(output: Path) -> list[Section]:
    return sections_of(record_path(output))
