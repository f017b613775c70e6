"""The lock of a model: a finished results tree in, `locks/<model>.lock.json` out, sorted, to be committed.

A lock is made of sections: what each artefact must be, by name, and on what terms each check was passed. A section
comes from the manifest of the artefact and from the record of how it was made; beside the sections stand, by stage, the
code and the packages that made them, which name the cause when one differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.digest_cache import digest
from lockstep.artifacts.files import dump_json, read_json, sha256_json, write_bytes
from lockstep.artifacts.manifest_files import manifest_entries, named_files
from lockstep.errors import CheckError, InputError
from lockstep.provenance import code_identity
from lockstep.provenance.record import SUFFIX, checked_record, read_record, record_path, records
from lockstep.provenance.shapes import LOCK, misfit

MADE, TERMS = "made with", "checks"
# Stages that find out whether something is right, or what right is: all that the config says to them is locked.
CHECKS = ("validate", "compare", "reference", "golden")


@dataclass(frozen=True)
class Section:
    """One artefact, or the terms of one check: where it stands in the lock, what made it, and what it must be, by
    name."""

    where: tuple[str, ...]
    manifest: Path
    record: Mapping[str, Any]
    items: Mapping[str, Any]

    @property
    def stage(self) -> str:
        return self.record["stage"]


def lock_path(folder: Path, model: str) -> Path:
    return folder / f"{model}.lock.json"


def read_lock(path: Path) -> dict[str, Any]:
    """Raises InputError for a file that is absent or no lock."""
    lock = read_json(path, formats.LOCK)
    wrong = misfit(lock, LOCK) or next(
        (f"{MADE}: expected stages, found {name!r}" for name in sorted(lock[MADE]) if name not in code_identity.STAGES),
        None,
    )
    if wrong:
        raise InputError(f"{path}: {wrong}; take the lock as it was committed, or write it again with `lockstep lock`")
    return lock


def write_lock(results: Path, model: str, out: Path) -> Path:
    """Write the lock of the finished model `model` to `out`. Raises InputError where something was not made or not
    checked yet.

    Engines of other devices that stand in `out` already stay, as long as they are of these graphs, code and packages.
    """
    lock = collect(results, model)
    if out.is_file():
        _keep_devices(read_lock(out), lock)
    write_bytes(out, dump_json(lock).encode())
    return out


def _keep_devices(before: Mapping[str, Any], lock: dict[str, Any]) -> None:
    if before[MADE].get("build") != lock[MADE]["build"]:
        return
    for precision, parts in lock["precisions"].items():
        old = before.get("precisions", {}).get(precision, {})
        if old.get("graphs") == parts.get("graphs"):
            for backend, devices in parts.get("engines", {}).items():
                parts["engines"][backend] = {**old.get("engines", {}).get(backend, {}), **devices}


def device_name(backend: Mapping[str, Any]) -> str:
    """A device as a lock names it, from a backend's identity: its architecture or name, and the first digits of the
    sha256 of all that must be equal."""
    device = backend["device"]
    return f"{device.get('architecture') or device.get('name') or backend['name']} {sha256_json(device)[:12]}"


def collect(results: Path, model: str) -> dict[str, Any]:
    """The lock of what is there. Raises InputError for a model that is not finished, CheckError for stages that were
    run with several versions."""
    found = list(sections(results, model))
    for stage in ("resolve", "convert", "export", "validate", "build", "reference", "golden"):
        if stage not in {section.stage for section in found}:
            raise InputError(
                f"{results / model}: expected a finished model, found nothing that {stage} made; run snakemake first"
            )
    lock: dict[str, Any] = {"format": formats.LOCK, "model": model, MADE: {}}
    for section in found:
        put(lock, section)
    return lock


def put(lock: dict[str, Any], section: Section) -> None:
    """Add a section to a lock. Raises CheckError when another of the same stage was made with other code or
    packages."""
    made = made_with(section.record)
    if lock[MADE].setdefault(section.stage, made) != made:
        raise CheckError(
            f"{section.manifest}: expected to be made as the other results of {section.stage}, "
            f"found other code or packages; run snakemake first"
        )
    place = lock
    for name in section.where[:-1]:
        place = place.setdefault(name, {})
    place[section.where[-1]] = dict(section.items)


def made_with(record: Mapping[str, Any]) -> dict[str, Any]:
    """Code and packages of a stage, as a lock holds them."""
    environment = record["environment"]
    return {"code": sha256_json(record["code"]), "environment": sha256_json(environment), "packages": environment}


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
    record = checked_record(path)
    manifest = path.with_name(f"{path.name.removesuffix(SUFFIX)}.json")
    names, stage = record["names"], record["stage"]
    if stage not in _ITEMS and stage not in CHECKS:
        return []
    if read_record(manifest) is None:
        raise CheckError(
            f"{manifest}: expected the file that {path.name} is of, found "
            f"{'another' if manifest.is_file() else 'none'}; delete it and run again"
        )
    found = []
    if stage in _ITEMS:
        with manifest_entries(manifest):
            where, items = _ITEMS[stage](manifest, record, names)
        found.append(Section(where, manifest, record, items))
    if stage in CHECKS:
        found.append(Section(terms_place(stage, names), manifest, record, terms(record["options"])))
    return found


def sections_at(output: Path) -> list[Section]:
    """The sections of the artefact whose manifest is `output`."""
    return sections_of(record_path(output))


def _checkpoint(
    manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    value = read_json(manifest)
    about = {"source": value["source"], **({"commit": value["commit"]} if value.get("commit") else {})}
    return ("checkpoint",), {**about, **{file["path"]: file["sha256"] for file in value["files"]}}


def _weights(
    manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    return ("precisions", names["precision"], "weights"), {
        file.path.name: file.sha256 for file in named_files(manifest)
    }


def _graphs(
    manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    graphs = {file.path.name: file.sha256 for file in named_files(manifest)}
    return ("precisions", names["precision"], "graphs"), {**graphs, manifest.name: digest(manifest)}


def _engines(
    manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    engines = {entry["file"]: entry["sha256"] for entry in read_json(manifest)["engines"].values()}
    backend = {key: value for key, value in record["backend"].items() if key != "name"}
    return ("precisions", names["precision"], "engines", names["backend"], device_name(record["backend"])), {
        **engines,
        **backend,
    }


def _golden(
    manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    value = read_json(manifest)
    return ("precisions", names["precision"], "golden", names["backend"], names["layers"]), _tokens(value["prompts"])


def _reference(
    manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    return ("reference", names["layers"]), _tokens(read_json(manifest)["prompts"])


def _tokens(prompts: list[dict[str, Any]]) -> dict[str, str]:
    """Token ids on one line by prompt: a difference is then one line too."""
    return {prompt["text"]: " ".join(map(str, prompt["tokens"])) for prompt in prompts}


_ITEMS = {
    "resolve": _checkpoint,
    "convert": _weights,
    "export": _graphs,
    "build": _engines,
    "golden": _golden,
    "reference": _reference,
}
