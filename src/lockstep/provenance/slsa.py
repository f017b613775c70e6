"""Statements of who made what of what: `provenance.json` in the folder of engines.json, and those of rebuilds.

An in-toto Statement v1 (https://in-toto.io/Statement/v1) with a SLSA provenance v1 predicate
(https://slsa.dev/provenance/v1), as plain JSON; docs/statements.md says what its fields hold. Times stand here only:
a statement is no input of any stage and no part of a record or a lock. The predicate's extension field
`lockstep_sealed_sha256` in provenance.json is the digest of all the rest.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import dump_json, read_json, sha256_json, write_bytes
from lockstep.config.sources import HubSource, parse_source
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import named_files
from lockstep.provenance.record import outputs_of
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.stages import Job

NAME = "provenance.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# Builder and build type: the page of the manual, as a file of the package (https://github.com/package-url/purl-spec).
MANUAL = "pkg:generic/lockstep#docs/statements.md"
SEAL = "lockstep_sealed_sha256"
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"


def provenance_path(engines_json: Path) -> Path:
    return engines_json.with_name(NAME)


def now() -> str:
    """Return the time in UTC to the second, as RFC 3339.

    It is that of SOURCE_DATE_EPOCH where it is set (https://reproducible-builds.org/specs/source-date-epoch).
    """
    text = os.environ.get(EPOCH_VARIABLE) or str(int(time.time()))
    try:
        if not (text.isascii() and text.isdecimal()):
            raise ValueError
        return datetime.datetime.fromtimestamp(int(text), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        raise InputError(
            f"{EPOCH_VARIABLE}: expected seconds since 1970 as a whole number, found {text[:40]!r}; correct or unset it"
        ) from None


def statement(
    subjects: Mapping[str, str],
    parameters: Mapping[str, Any],
    dependencies: Iterable[Mapping[str, Any]],
    internal: Mapping[str, Any] = {},
    code: Mapping[str, str] = {},
    started: str | None = None,
) -> dict[str, Any]:
    """Return the statement of a build that ends now.

    subjects: sha256 by name. parameters: what its user asked for. dependencies: descriptors of in-toto. internal: what
    followed from them. code: sha256 of parts of this package, by path.
    """
    parts = [{"name": f"lockstep/{part}", "digest": {"sha256": sha256}} for part, sha256 in sorted(code.items())]
    builder = {"id": MANUAL, "version": {"lockstep": __version__}, "builderDependencies": parts}
    times = {"startedOn": started, "finishedOn": now()}
    definition = {
        "buildType": MANUAL,
        "externalParameters": dict(parameters),
        "internalParameters": dict(internal),
        "resolvedDependencies": list(dependencies),
    }
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(subjects.items())],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": definition,
            "runDetails": {
                "builder": builder,
                "metadata": {name: time for name, time in times.items() if time is not None},
            },
        },
    }


def write_provenance(step: Job, key: BuildKey, started: str) -> Path:
    """Write the provenance of an engine set, and return its path. The build `step` has just made the set with `key`."""
    engines = EngineSetManifest.load(step.output)
    provenance = statement(
        outputs_of(step.output),
        {**step.names, "options": engines.options},
        _dependencies(step, key),
        {"buildKey": key.sha256, "backend": key.backend, "device": engines.device},
        key.code,
        started,
    )
    provenance["predicate"][SEAL] = _seal(provenance)
    path = provenance_path(step.output)
    write_bytes(path, dump_json(provenance).encode())
    return path


def _dependencies(step: Job, key: BuildKey) -> Iterator[dict[str, Any]]:
    assembly = step.inputs["assembly"]
    for path, sha256 in [(assembly, digest(assembly)), *((file.path, file.sha256) for file in named_files(assembly))]:
        yield {"name": f"graphs/{path.name}", "digest": {"sha256": sha256}}
    yield from _checkpoint_files(step)
    yield from ({"name": name, "uri": url} for name, _, url in libraries(key))


# Backends that are called as the package or the library that builds for them.
_PACKAGES = ("openvino",)
_LIBRARIES = ("tensorrt", "tensorrt_rtx")


def libraries(key: BuildKey) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and package URL of the packages and libraries that an artefact was made with."""
    packages = dict(key.environment)
    native: dict[str, str] = {}
    if key.backend:
        native |= key.backend.get("libraries", {})
        builder = {key.backend["name"]: key.backend["version"]}
        packages |= {name: version for name, version in builder.items() if name in _PACKAGES}
        native |= {name: version for name, version in builder.items() if name in _LIBRARIES}
    yield from package_urls(packages)
    yield from package_urls(native, "generic")


def package_urls(versions: Mapping[str, str], kind: str = "pypi") -> Iterator[tuple[str, str, str]]:
    """Yield name, version and package URL of each. kind: of all but Python itself."""
    for name, version in sorted(versions.items()):
        yield name, str(version), f"pkg:{'generic' if name == 'python' else kind}/{name}@{version}"


def _checkpoint_files(step: Job) -> Iterator[dict[str, Any]]:
    """Yield the files that the graphs were made of: config and tokenizer.

    Weights are none of them, for engines hold none.
    """
    results = Results(step.inputs["assembly"].parents[3])
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


def _seal(provenance: Mapping[str, Any]) -> str:
    bare = copy.deepcopy(dict(provenance))
    bare["predicate"].pop(SEAL, None)
    return sha256_json(bare)


def wrong_provenance(path: Path) -> str | None:
    """Return why the provenance at `path` is not that of the engine set in its folder; None when it is."""
    again = "`lockstep stage build` makes it again"
    try:
        data = path.read_bytes()
        provenance = json.loads(data)
        is_whole = provenance["predicate"][SEAL] == _seal(provenance) and data == dump_json(provenance).encode()
        subjects = {subject["name"]: subject["digest"]["sha256"] for subject in provenance["subject"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"expected an in-toto statement, found something else; {again}"
    if not is_whole:
        return f"the file is damaged; {again}"
    engines = path.with_name("engines.json")
    with contextlib.suppress(InputError):  # a damaged manifest, with which nothing can be compared
        outputs = outputs_of(engines) if engines.is_file() else {}
        if differing := sorted({name for name, _ in subjects.items() ^ outputs.items()}):
            return f"it is of another engine set: {differing[0]} differs; {again}"
    return None
