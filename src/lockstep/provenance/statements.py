"""The build key of an artefact, and its statement: `assembly.statement.json` next to `assembly.json`.

A job in. Its statement records the digests of the inputs, the options, the code of the stage, the versions of its
packages, the version and device of a backend, and the digest of each output file.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.files import read_json
from lockstep.artifacts.statement import SUFFIX, BuildKey, Statement, statement_path
from lockstep.backends import identity
from lockstep.config.sources import HubSource, parse_source
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import content, named_files
from lockstep.provenance import code_identity
from lockstep.stages import STAGES, Job
from lockstep.targets import Results


def build_key(job: Job) -> BuildKey:
    stage = STAGES[job.stage]
    backend = job.backend
    return BuildKey(
        stage=job.stage,
        # Results do not depend on the model's name, except for reports, which contain it.
        names={name: str(value) for name, value in job.names.items() if name != "model" or stage.is_judged},
        inputs={name: content(path) for name, path in job.inputs.items()},
        options=dict(job.options),
        code=code_identity.code_digests(stage.module, backend),
        environment=code_identity.installed_packages(stage.module, backend),
        backend=backend_identity(job) if backend else None,
    )


def backend_identity(job: Job) -> dict[str, Any]:
    """Return the library and device of a job's engines. Raises InputError where this machine lacks them."""
    if job.device is not None:
        _check_device(job, job.device)
    assert job.backend is not None
    return identity.identity(job.backend, runs=not STAGES[job.stage].builds_engines)


def _check_device(job: Job, device: Mapping[str, str]) -> None:
    remedy = "start it where that is, or correct the config"
    try:
        # None: the backend's engines can be built anywhere.
        hardware: str | None = identity.hardware(device["backend"], builds=STAGES[job.stage].builds_engines)
    # Reported together with the hardware that the config asks for.
    except InputError as error:
        hardware = "none"
        remedy = f"{remedy} ({error})"
    if hardware is not None and hardware != device["hardware"]:
        raise InputError(
            f"{job}: expected {device['hardware']!r}, the device {job.names['backend']} of the config, found "
            f"{hardware!r} on {platform.node()}; {remedy}"
        )


def write_statement(job: Job, key: BuildKey) -> Statement:
    """Write the statement of `job`, which has just made its output with `key`, and return it."""
    statement = Statement(key, outputs_of(job.output))
    if STAGES[job.stage].builds_engines:
        statement = replace(statement, sources=tuple(_sources(job)))
    statement.save(statement_path(job.output))
    return statement


def outputs_of(manifest: Path) -> dict[str, str]:
    """Return {path relative to the manifest's folder: hex sha256} of the manifest and its files in this folder.

    The digests of files are those in the manifest: the stage has just hashed them.
    """
    outputs = {manifest.name: digest(manifest)}
    if manifest.suffix != ".json":
        return outputs
    for file in named_files(manifest):
        name = Path(os.path.relpath(file.path, manifest.parent))
        if name.parts[0] != "..":
            outputs.setdefault(name.as_posix(), file.sha256)
    return outputs


def _sources(job: Job) -> Iterator[dict[str, Any]]:
    """Yield descriptors of the sources of engines: graphs, config and tokenizer. Engines hold no weights."""
    assembly = job.inputs["assembly"]
    for path, sha256 in [(assembly, digest(assembly)), *((file.path, file.sha256) for file in named_files(assembly))]:
        yield {"name": f"graphs/{path.name}", "digest": {"sha256": sha256}}
    results = Results(assembly.parents[3])
    manifest = results.architecture(job.names["model"])
    # The graphs may have been copied here without their checkpoint.
    if not manifest.is_file():
        return
    value = CheckpointManifest.load(manifest)
    origin = purl(value.source, results.source(job.names["model"]))
    for file in value.files:
        descriptor: dict[str, Any] = {"name": f"checkpoint/{file.path}", "digest": {"sha256": file.sha256}}
        if origin:
            descriptor["uri"] = f"{origin}#{file.path}"
        yield descriptor


def purl(source: str, fetched: Path) -> str | None:
    """Return the package URL of a model on the hub at its commit; None for a folder, which has digests only."""
    kind = parse_source(source)
    if not isinstance(kind, HubSource) or not fetched.is_file():
        return None
    commit = read_json(fetched).get("commit")
    if not commit:
        return None
    return f"pkg:huggingface/{kind.repository}@{commit}"


def read_statement(output: Path) -> Statement | None:
    """Return the statement of `output`; None if absent or of another file. Raises InputError if damaged."""
    path = statement_path(output)
    if not path.is_file():
        return None
    statement = Statement.load(path)
    if not output.is_file() or statement.outputs.get(output.name) != digest(output):
        return None
    return statement


def stated(manifest: Path) -> Statement:
    """Return the statement of the manifest. Raises InputError where one of both is missing, or is of another file."""
    statement = read_statement(manifest)
    if statement is None:
        raise InputError(
            f"{manifest}: expected a manifest and the statement of how it was made, found none; run `lockstep run`"
        )
    return statement


def statement_paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"))
