"""The SLSA provenance of an engine set, `provenance.json` beside engines.json.

A build step and its key in, the file out. Only here do times stand.

An in-toto Statement v1 (https://in-toto.io/Statement/v1) with a SLSA provenance v1 predicate
(https://slsa.dev/provenance/v1), as plain JSON: subjects are the engine files and their manifest, resolved dependencies
the graphs, the files of the checkpoint that these were made of, and the packages. It is no input of any stage and no
part of a record or a lock. The predicate's extension field `lockstep_sealed_sha256` is the digest of all the rest.
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
# Package URLs: https://github.com/package-url/purl-spec.
BUILDER = "pkg:generic/lockstep"
BUILD_TYPE = f"{BUILDER}#build/1"
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


def write_provenance(step: Job, key: BuildKey, started: str) -> Path:
    """Write the provenance of an engine set, and return its path. The build `step` has just made the set with `key`."""
    statement = make(step, key, started, now())
    statement["predicate"][SEAL] = _seal(statement)
    path = provenance_path(step.output)
    write_bytes(path, dump_json(statement).encode())
    return path


def make(step: Job, key: BuildKey, started: str, finished: str) -> dict[str, Any]:
    """Return the statement, not sealed."""
    engines = EngineSetManifest.load(step.output)
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {**step.names, "options": engines.options},
        "internalParameters": {"buildKey": key.sha256, "backend": key.backend, "device": engines.device},
        "resolvedDependencies": list(_dependencies(step, key)),
    }
    builder = {
        "id": BUILDER,
        "version": {"lockstep": __version__},
        "builderDependencies": [
            {"name": f"lockstep/{part}", "digest": {"sha256": digest}} for part, digest in sorted(key.code.items())
        ],
    }
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(outputs_of(step.output).items())
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": definition,
            "runDetails": {"builder": builder, "metadata": {"startedOn": started, "finishedOn": finished}},
        },
    }


def _dependencies(step: Job, key: BuildKey) -> Iterator[dict[str, Any]]:
    assembly = step.inputs["assembly"]
    for path, sha256 in [(assembly, digest(assembly)), *((file.path, file.sha256) for file in named_files(assembly))]:
        yield {"name": f"graphs/{path.name}", "digest": {"sha256": sha256}}
    yield from _checkpoint_files(step)
    yield from ({"name": name, "uri": url} for name, _, url in libraries([key]))


# backends that are called as what builds for them
_PACKAGES = ("openvino",)
_LIBRARIES = ("tensorrt", "tensorrt_rtx")


def libraries(keys: Iterable[BuildKey]) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and package URL of the packages and libraries that artefacts were made with."""
    keys = list(keys)
    packages = {item for key in keys for item in key.environment.items()}
    # What built engines, where that is a library by itself: OpenVINO, TensorRT.
    builders = {(key.backend["name"], key.backend["version"]) for key in keys if key.backend}
    packages |= {item for item in builders if item[0] in _PACKAGES}
    native = {item for key in keys for item in (key.backend or {}).get("libraries", {}).items()}
    native |= {item for item in builders if item[0] in _LIBRARIES}
    for kind, found in (("pypi", packages), ("generic", native)):
        for name, version in sorted(found):
            yield name, str(version), f"pkg:{'generic' if name == 'python' else kind}/{name}@{version}"


def _checkpoint_files(step: Job) -> Iterator[dict[str, Any]]:
    """Yield the files that the graphs were made of: config and tokenizer.

    Weights are none of them, for engines hold none.
    """
    results = Results(step.inputs["assembly"].parents[3])
    manifest = results.architecture(step.names["model"])
    if not manifest.is_file():
        return  # graphs that were brought here without their checkpoint
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


def _seal(statement: Mapping[str, Any]) -> str:
    bare = copy.deepcopy(dict(statement))
    bare["predicate"].pop(SEAL, None)
    return sha256_json(bare)


def wrong_provenance(path: Path) -> str | None:
    """Return why the provenance at `path` is not that of the engine set beside it. None when it is."""
    again = "`lockstep stage build` makes it again"
    try:
        data = path.read_bytes()
        statement = json.loads(data)
        whole = statement["predicate"][SEAL] == _seal(statement) and data == dump_json(statement).encode()
        subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"expected an in-toto statement, found something else; {again}"
    if not whole:
        return f"the file is damaged; {again}"
    engines = path.with_name("engines.json")
    with contextlib.suppress(InputError):  # a damaged manifest, with which nothing can be compared
        found = outputs_of(engines) if engines.is_file() else {}
        if differing := sorted({name for name, _ in subjects.items() ^ found.items()}):
            return f"it is of another engine set: {differing[0]} differs; {again}"
    return None
