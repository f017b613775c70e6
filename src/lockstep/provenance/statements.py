"""The build key of an artefact, and its statement: `assembly.statement.json` beside `assembly.json`.

A job in. Its statement says what its artefact was made of: the digests of the inputs, the options, the code of the
stage, the versions of its packages, for what a backend makes its version and device, and the digest of each file that
came out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
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


def write_statement(step: Job, key: BuildKey) -> Statement:
    """Write the statement of `step`, and return it. The step has just made its output with `key`."""
    sources = tuple(_sources(step)) if STAGES[step.stage].builds_engines else ()
    statement = Statement(key, outputs_of(step.output), sources)
    statement.save(statement_path(step.output))
    for name in (f"{step.output.stem}.build.json", "provenance.json"):  # of Lockstep 0.2
        step.output.with_name(name).unlink(missing_ok=True)
    return statement


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


def _sources(step: Job) -> Iterator[dict[str, Any]]:
    """Yield descriptors of what engines are built from: graphs, and the config and tokenizer that those were made of.

    Weights are none of them, for engines hold none.
    """
    assembly = step.inputs["assembly"]
    for path, sha256 in [(assembly, digest(assembly)), *((file.path, file.sha256) for file in named_files(assembly))]:
        yield {"name": f"graphs/{path.name}", "digest": {"sha256": sha256}}
    results = Results(assembly.parents[3])
    manifest = results.architecture(step.names["model"])
    if not manifest.is_file():
        return  # graphs that were copied here without their checkpoint
    value = CheckpointManifest.load(manifest)
    origin = purl(value.source, results.source(step.names["model"]))
    for file in value.files:
        about = {"uri": f"{origin}#{file.path}"} if origin else {}
        yield {"name": f"checkpoint/{file.path}", **about, "digest": {"sha256": file.sha256}}


def purl(source: str, fetched: Path) -> str | None:
    """Return the package URL of a model on the hub at its commit.

    None for a folder, whose files are known by their digests.
    """
    kind = parse_source(source)
    if not isinstance(kind, HubSource) or not fetched.is_file():
        return None
    commit = read_json(fetched).get("commit")
    return f"pkg:huggingface/{kind.repository}@{commit}" if commit else None


def read_statement(output: Path) -> Statement | None:
    """Return the statement of the manifest `output`.

    None where there is none, or where it is of another file. Raises InputError when it is damaged.
    """
    path = statement_path(output)
    if not path.is_file():
        return None
    statement = Statement.load(path)
    return statement if output.is_file() and statement.outputs.get(output.name) == digest(output) else None


def statements(folder: Path) -> Iterator[Path]:
    """Yield the paths of all statements below a folder."""
    return iter(sorted(folder.rglob(f"*{SUFFIX}")))
