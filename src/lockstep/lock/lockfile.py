"""The lock of a model: a finished results tree in, `locks/<model>.lock.json` out, sorted, to be committed.

A lock is made of sections, one for each artefact: what it must be, by name. A section comes from the manifest of the artefact and from the record of
how it was made; beside the sections stand, by stage, the code and the packages that made them, which name the cause when one differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import formats
from lockstep.errors import CheckError, InputError
from lockstep.files import dump_json, read_json, sha256_json, write_bytes
from lockstep.lock.record import SUFFIX, checked_record, read_record, record_path, records
from lockstep.seen import digest
from lockstep.sidefiles import named_files

MADE = "made with"


@dataclass(frozen=True)
class Section:
    """One artefact: where it stands in the lock, what made it, and what it must be, by name."""

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
    return read_json(path, formats.LOCK)


def write_lock(results: Path, model: str, out: Path) -> Path:
    """Write the lock of the finished model `model` to `out`. Raises InputError where something was not made or not checked yet.

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
    """A device as a lock names it, from a backend's identity: its architecture or name, and the first digits of the sha256 of all that must be equal."""
    device = backend["device"]
    return f"{device.get('architecture') or device.get('name') or backend['name']} {sha256_json(device)[:12]}"


def collect(results: Path, model: str) -> dict[str, Any]:
    """The lock of what is there. Raises InputError for a model that is not finished, CheckError for stages that were run with several versions."""
    found = list(sections(results, model))
    for stage in ("resolve", "convert", "export", "build", "golden"):
        if stage not in {section.stage for section in found}:
            raise InputError(f"{results / model}: expected a finished model, found nothing that {stage} made; run snakemake first")
    lock: dict[str, Any] = {"format": formats.LOCK, "model": model, MADE: {}}
    for section in found:
        put(lock, section)
    return lock


def put(lock: dict[str, Any], section: Section) -> None:
    """Add a section to a lock. Raises CheckError when another of the same stage was made with other code or packages."""
    made = made_with(section.record)
    if lock[MADE].setdefault(section.stage, made) != made:
        raise CheckError(f"{section.manifest}: expected to be made as the other results of {section.stage}, found other code or packages; run snakemake first")
    place = lock
    for name in section.where[:-1]:
        place = place.setdefault(name, {})
    place[section.where[-1]] = dict(section.items)


def made_with(record: Mapping[str, Any]) -> dict[str, Any]:
    """Code and packages of a stage, as a lock holds them."""
    environment = record["environment"]
    return {"code": sha256_json(record["code"]), "environment": sha256_json(environment), "packages": environment}


def sections(results: Path, model: str) -> Iterator[Section]:
    """Of all artefacts of a model that are locked, in the order of their paths."""
    for path in records(results / model):
        section = section_of(path)
        if section is not None:
            yield section


def section_of(path: Path) -> Section | None:
    """The section of the record at `path`; None for an artefact that is not locked, such as a report.

    Raises InputError or CheckError when record and manifest are damaged or do not belong together.
    """
    record = checked_record(path)
    manifest = path.with_name(f"{path.name.removesuffix(SUFFIX)}.json")
    names, make = record["names"], _ITEMS.get(record["stage"])
    if make is None:
        return None
    if read_record(manifest) is None:
        raise CheckError(f"{manifest}: expected the file that {path.name} is of, found {'another' if manifest.is_file() else 'none'}; delete it and run again")
    where, items = make(manifest, record, names)
    return Section(where, manifest, record, items)


def section_at(output: Path) -> Section | None:
    """The section of the artefact whose manifest is `output`."""
    return section_of(record_path(output))


def _checkpoint(manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    value = read_json(manifest)
    about = {"source": value["source"], **({"commit": value["commit"]} if value.get("commit") else {})}
    return ("checkpoint",), {**about, **{file["path"]: file["sha256"] for file in value["files"]}}


def _weights(manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    return ("precisions", names["precision"], "weights"), {file.path.name: file.sha256 for file in named_files(manifest)}


def _graphs(manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    graphs = {file.path.name: file.sha256 for file in named_files(manifest)}
    return ("precisions", names["precision"], "graphs"), {**graphs, manifest.name: digest(manifest)}


def _engines(manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    engines = {entry["file"]: entry["sha256"] for entry in read_json(manifest)["engines"].values()}
    backend = {key: value for key, value in record["backend"].items() if key != "name"}
    return ("precisions", names["precision"], "engines", names["backend"], device_name(record["backend"])), {**engines, **backend}


def _golden(manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    value = read_json(manifest)
    return ("precisions", names["precision"], "golden", names["backend"], names["layers"]), _tokens(value["prompts"])


def _reference(manifest: Path, record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    return ("reference", names["layers"]), _tokens(read_json(manifest)["prompts"])


def _tokens(prompts: list[dict[str, Any]]) -> dict[str, str]:
    """Token ids on one line by prompt: a difference is then one line too."""
    return {prompt["text"]: " ".join(map(str, prompt["tokens"])) for prompt in prompts}


_ITEMS = {"resolve": _checkpoint, "convert": _weights, "export": _graphs, "build": _engines, "golden": _golden, "reference": _reference}
