"""The build key of an artefact, and its record `<manifest>.build.json`.

A record is written next to the manifest of a step's output, and says what it was made of: the digests of the inputs,
the options, the code of the stage, the versions of its packages, for what a backend makes its version and device, and
the digest of each file that came out. It holds no time and no place: two machines with one key write the same record.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.build_record import BuildKey, BuildRecord
from lockstep.artifacts.document import ValidationError
from lockstep.artifacts.files import read_json, write_json
from lockstep.backends import identity
from lockstep.errors import CheckError, InputError
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import SUFFIX, content, named_files, record_path
from lockstep.provenance import code_identity
from lockstep.provenance.diff import check_depth
from lockstep.stages import STAGES, Job


def build_key(step: Job) -> BuildKey:
    """Return the build key of `step`: all that decides what it makes."""
    stage = STAGES[step.stage]
    backend = step.backend
    identity_of_backend = backend_identity(step) if backend else None
    return BuildKey(
        stage=step.stage,
        # Results do not depend on the model's name, except for reports, which contain it.
        names={name: str(value) for name, value in step.names.items() if name != "model" or stage.is_judged},
        inputs={name: content(path) for name, path in step.inputs.items()},
        options=dict(step.options),
        code=code_identity.code_digests(stage.module, backend),
        environment=code_identity.installed_packages(stage.module, backend),
        backend=identity_of_backend,
    )


def backend_identity(step: Job) -> dict[str, Any]:
    """Return the library and the device that the step's engines are for.

    Raises InputError where the library is not installed, and where this machine has not the device that the config
    names.
    """
    if step.device:
        _check_device(step, step.device)
    assert step.backend is not None
    return identity.identity(step.backend, runs=not STAGES[step.stage].builds_engines)


def _check_device(step: Job, device: Mapping[str, str]) -> None:
    name = step.names["backend"]
    remedy = "start it where that is, or correct the config"
    try:
        hardware: str | None = identity.hardware(device["backend"], builds=STAGES[step.stage].builds_engines)
    except InputError as error:
        hardware = "none"
        remedy = f"{remedy} ({error})"
    if hardware is not None and hardware != device["hardware"]:
        raise InputError(
            f"{step}: expected {device['hardware']!r}, the device {name} of the config, found {hardware!r} on "
            f"{platform.node()}; {remedy}"
        )


def write_record(step: Job, key: BuildKey) -> BuildRecord:
    """Write the record of `step`, and return it. The step has just made its output with `key`."""
    record = BuildRecord(key, outputs_of(step.output))
    write_json(record_path(step.output), record.to_json())
    return record


def outputs_of(manifest: Path) -> dict[str, str]:
    """Return the hex sha256 of an artefact's files, by path.

    Paths are relative to the manifest's folder: of the manifest, and of those that it names as its own. The digests of
    the latter are those of the manifest: who made it has just hashed them. Files of another folder are not its own.
    """
    outputs = {manifest.name: digest(manifest)}
    for file in named_files(manifest) if manifest.suffix == ".json" else ():
        name = Path(os.path.relpath(file.path, manifest.parent))
        if name.parts[0] != "..":
            outputs.setdefault(name.as_posix(), file.sha256)
    return outputs


def read_record(output: Path) -> BuildRecord | None:
    """Return the record of the manifest `output`.

    None where there is none, or where it is of another file. Raises InputError when it is damaged.
    """
    path = record_path(output)
    if not path.is_file():
        return None
    record = checked_record(path)
    return record if output.is_file() and record.outputs.get(output.name) == digest(output) else None


def checked_record(path: Path) -> BuildRecord:
    """Return a record whose key is that of its parts. Raises InputError, or CheckError for parts that were changed."""
    value = read_json(path, formats.BUILD)
    try:
        check_depth(value)
        record = BuildRecord.from_json(value)
    except ValidationError as error:
        raise InputError(f"{path}: {error}; delete the file and run again") from None
    if value != record.to_json():
        raise CheckError(f"{path}: expected the key of what it lists, found another; delete the file and run again")
    return record


def records(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.rglob(f"*{SUFFIX}")))
