"""The lock of a model: a finished results tree in, `locks/<model>.lock.json` out, sorted, to be committed.

A lock is made of sections: what each artefact must be, by name, and on what terms each check was passed. A section
comes from the manifest of the artefact and from the record of how it was made. Beside the sections stands, by stage,
what made them (code, packages, library): it decides nothing, and names the cause where an artefact differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import dump_json, read_json, sha256_json, write_bytes
from lockstep.artifacts.manifest_files import manifest_entries
from lockstep.errors import CheckError, InputError
from lockstep.pipeline.stage import Finished
from lockstep.pipeline.stages import STAGES
from lockstep.provenance.record import SUFFIX, checked_record, read_record, record_path, records
from lockstep.provenance.shapes import LOCK, misfit

MADE, TERMS = "made with", "checks"


@dataclass(frozen=True)
class Section:
    """One artefact, or the terms of one check: where it stands in the lock, its build key, and what it must be, by
    name."""

    where: tuple[str, ...]
    manifest: Path
    key: BuildKey
    items: Mapping[str, Any]

    @property
    def stage(self) -> str:
        return self.key.stage


def lock_path(folder: Path, model: str) -> Path:
    return folder / f"{model}.lock.json"


def read_lock(path: Path) -> dict[str, Any]:
    """Raises InputError for a file that is absent or no lock."""
    lock = read_json(path, formats.LOCK)
    wrong = misfit(lock, LOCK) or next(
        (f"{MADE}: expected stages, found {name!r}" for name in sorted(lock[MADE]) if name.split("/")[0] not in STAGES),
        None,
    )
    if wrong:
        raise InputError(f"{path}: {wrong}; take the lock as it was committed, or write it again with `lockstep lock`")
    return lock


def write_lock(results: Path, model: str, out: Path) -> Path:
    """Write the lock of the finished model `model` to `out`. Raises InputError where something was not made or not
    checked yet.

    Engines of other devices that stand in `out` already stay, as long as they are of these graphs; so does all of
    engines that are not built here because this processor does not compute in their precision.
    """
    lock = collect(results, model)
    if out.is_file():
        before = read_lock(out)
        _keep_devices(before, lock)
        _keep_not_built(before, lock)
    write_bytes(out, dump_json(lock).encode())
    return out


def _keep_devices(before: Mapping[str, Any], lock: dict[str, Any]) -> None:
    for precision, parts in lock["precisions"].items():
        old = before.get("precisions", {}).get(precision, {})
        if old.get("graphs") == parts.get("graphs"):
            for backend, devices in parts.get("engines", {}).items():
                parts["engines"][backend] = {**old.get("engines", {}).get(backend, {}), **devices}


def _keep_not_built(before: Mapping[str, Any], lock: dict[str, Any]) -> None:
    from lockstep.config.backends import backends  # loads pydantic, which verify does without

    for precision, parts in lock["precisions"].items():
        old = before.get("precisions", {}).get(precision, {})
        for backend in old.get("engines", {}).keys() - parts.get("engines", {}).keys():
            settings = backends().get(backend)
            if old["graphs"] != parts.get("graphs") or settings is None or not settings.lacks_here(precision):
                continue
            for kind in ("engines", "golden"):
                if backend in old.get(kind, {}):
                    parts.setdefault(kind, {})[backend] = old[kind][backend]
            for stage, terms in before.get(TERMS, {}).items():
                kept = {name: of for name, of in terms.items() if _is_of(name, precision, backend)}
                if kept:
                    lock[TERMS].setdefault(stage, {}).update(kept)
            lock[MADE] = {
                **{name: of for name, of in before[MADE].items() if name.endswith(f"/{backend}")},
                **lock[MADE],
            }


def _is_of(name: str, precision: str, backend: str) -> bool:
    """Whether the terms of a check under this name are of engines in `precision` for `backend`."""
    return name.startswith(f"{precision}/") and name.endswith(f"/{backend}")


def collect(results: Path, model: str) -> dict[str, Any]:
    """The lock of what is there. Raises InputError for a model that is not finished."""
    found = list(sections(results, model))
    stages = {section.stage for section in found}
    finished = Finished(
        frozenset(section.key.names["precision"] for section in found if "precision" in section.key.names),
        has_adapters="adapters" in stages,
        runs=any(map(_runs, found)),
    )
    for stage, entry in STAGES.items():
        if entry.is_required(finished) and stage not in stages:
            raise InputError(
                f"{results / model}: expected a finished model, found nothing that {stage} made; run snakemake first"
            )
    lock: dict[str, Any] = {"format": formats.LOCK, "model": model, MADE: {}}
    for section in found:
        put(lock, section)
    return lock


def _runs(section: Section) -> bool:
    """Whether it is of engines that run here."""
    if section.stage != "build":
        return False
    from lockstep.config.backends import backends  # loads pydantic, which verify does without

    engines = EngineSetManifest.load(section.manifest)
    if engines.backend not in backends():
        raise InputError(
            f"{section.manifest}: expected a backend of {', '.join(backends())}, found {engines.backend!r}; delete it "
            f"and run again"
        )
    return backends()[engines.backend].cannot_run(engines.options) is None


def put(lock: dict[str, Any], section: Section) -> None:
    """Add a section to a lock, with what made it."""
    lock[MADE][maker(section.key)] = made_with(section.key)
    place = lock
    for name in section.where[:-1]:
        place = place.setdefault(name, {})
    place[section.where[-1]] = dict(section.items)


def maker(key: BuildKey) -> str:
    """The name that a lock has for what made an artefact: the stage, and the backend where one runs it."""
    return "/".join([key.stage, *([key.names["backend"]] if "backend" in key.names else [])])


def made_with(key: BuildKey) -> dict[str, Any]:
    """Code, packages and library of a stage, as a lock holds them."""
    backend = {name: value for name, value in (key.backend or {}).items() if name not in ("name", "device")}
    return {
        "code": sha256_json(key.code),
        "packages": key.environment,
        **({} if STAGES[key.stage].is_check else {"options": json.loads(dump_json(key.options))}),
        **({"backend": json.loads(dump_json(backend))} if backend else {}),
    }


def terms_place(stage: str, names: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the terms of a check stand in the lock of its model. names: precision, layers and backend, those that the
    stage has."""
    return (TERMS, stage, "/".join(str(names[name]) for name in ("precision", "layers", "backend") if name in names))


def terms(options: Mapping[str, Any]) -> dict[str, Any]:
    """All that the config says to a check, as a lock holds it: tolerances, prompts, lengths, limits, expected texts."""
    return numbered(json.loads(dump_json(options)))


def numbered(value: Any) -> Any:
    """Lists as mappings by number: what differs in them then has a place too."""
    if isinstance(value, Mapping):
        return {name: numbered(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"{number:03d}": numbered(item) for number, item in enumerate(value)}
    return value


def sections(results: Path, model: str) -> Iterator[Section]:
    """Of all artefacts of a model that are locked, in the order of their paths."""
    for path in records(results / model):
        yield from sections_of(path)


def sections_of(path: Path) -> list[Section]:
    """The sections of the record at `path`; none for what is not locked, such as a report.

    Raises InputError or CheckError when record and manifest are damaged or do not belong together.
    """
    key = checked_record(path).key
    manifest = path.with_name(f"{path.name.removesuffix(SUFFIX)}.json")
    entry = STAGES.get(key.stage)
    if entry is None or not (entry.pinned or entry.is_check):
        return []
    if read_record(manifest) is None:
        raise CheckError(
            f"{manifest}: expected the file that {path.name} is of, found "
            f"{'another' if manifest.is_file() else 'none'}; delete it and run again"
        )
    found = []
    if entry.pinned:
        with manifest_entries(manifest):
            where, items = entry.pinned(manifest, key)
        found.append(Section(where, manifest, key, items))
    if entry.is_check:
        found.append(Section(terms_place(key.stage, key.names), manifest, key, terms(key.options)))
    return found


def sections_at(output: Path) -> list[Section]:
    """The sections of the artefact whose manifest is `output`."""
    return sections_of(record_path(output))
