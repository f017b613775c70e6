"""The provenance of an artefact: an in-toto statement next to its manifest, with SLSA's provenance as predicate.

A Statement v1 (https://in-toto.io/Statement/v1) whose predicate is https://slsa.dev/provenance/v1, as plain JSON;
docs/statements.md lists its fields. It has no times and no paths of a machine: two machines that build the same from
the same write the same bytes. The predicate's extension field `lockstep_sha256` is the digest of all the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lockstep.artifacts.bounds import Digest, PlainPath
from lockstep.artifacts.document import JsonObject, ValidationError, check_depth, like, reader
from lockstep.artifacts.files import dump_json, read_json, sha256_json, write_bytes
from lockstep.errors import InputError

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# Builder and build type: the page of the manual, as a file of the package (https://github.com/package-url/purl-spec).
MANUAL = "pkg:generic/lockstep#docs/statements.md"
DIGEST = "lockstep_sha256"
CONTENT = "lockstep_content"  # a digest of a manifest's content without the paths in it
SUFFIX = ".statement.json"
# Backends that have the name of the package, or of the native library, that builds their engines.
_PACKAGES = ("openvino",)
_LIBRARIES = ("tensorrt",)


@dataclass(frozen=True)
class _Backend:
    """The keys of a build key's backend that are read."""

    name: str
    device: Mapping[str, Any]


@dataclass(frozen=True)
class BuildKey(JsonObject):
    """The build key of a job: all that decides its result.

    names: the stage's wildcards. inputs: {name: value, mostly a sha256}. options: plain JSON. code: {path of a module:
    sha256}. environment: {package: version}. backend: its library and device; None for a stage without one.
    """

    stage: str
    names: Mapping[str, str]
    inputs: Mapping[str, str]
    options: Mapping[str, Any]
    code: Mapping[str, str]
    environment: Mapping[str, str]
    backend: Annotated[Mapping[str, Any], like(_Backend)] | None = None

    @property
    def sha256(self) -> str:
        """Return the hex digest of the key, which is also that of its entry in a cache."""
        return sha256_json(self.to_json())


_read_outputs = reader(Mapping[PlainPath, Digest])


@dataclass(frozen=True)
class Statement:
    """A build key, and the sha256 of each file that came out, by path relative to the manifest.

    sources: descriptors of files that are no part of the key, which has the digests of the manifests that name them.
    """

    key: BuildKey
    outputs: Mapping[str, str]
    sources: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike) -> Statement:
        """Read a statement. Raises InputError for a file that is none, or is not of its digest."""
        value = read_json(path)
        try:
            check_depth(value)
            return cls.from_json(value)
        except ValidationError as error:
            raise InputError(f"{path}: {error}; delete the file and run again") from None

    @classmethod
    def from_json(cls, value: Any) -> Statement:
        try:
            definition = value["predicate"]["buildDefinition"]
            parts = value["predicate"]["runDetails"]["builder"]["builderDependencies"]
            inputs = {}
            packages = {}
            sources = []
            # `to_json` writes three kinds of dependencies into one list, as SLSA has it. A backend's libraries have
            # annotations, and are left out: the key's backend has them too.
            for item in definition["resolvedDependencies"]:
                digests = item.get("digest", {})
                if CONTENT in digests:
                    inputs[item["name"]] = digests[CONTENT]
                elif digests:
                    sources.append(item)
                elif "annotations" not in item:
                    packages[item["name"]] = item["uri"].rpartition("@")[2]
            key = {
                **definition["externalParameters"],
                "inputs": inputs,
                "code": subjects(parts),
                "environment": packages,
                "backend": definition["internalParameters"].get("backend"),
            }
            statement = cls(BuildKey.from_json(key), _read_outputs(subjects(value["subject"])), tuple(sources))
            # The digest is compared with all else: whatever these fields do not hold would not be written back.
            is_whole = statement.to_json() == value
        except (LookupError, TypeError, AttributeError, ValueError):
            # The usual mistake is a manifest in the statement's place: name its format instead of quoting it.
            actual = value
            if isinstance(value, dict):
                actual = value.get("format") or value
            raise ValidationError("", "an in-toto statement of a build", actual) from None
        if not is_whole:
            raise ValidationError(DIGEST, "the digest of what the statement says", "another: the file is damaged")
        return statement

    def to_json(self) -> dict[str, Any]:
        key = self.key
        inputs = [{"name": name, "digest": {CONTENT: value}} for name, value in sorted(key.inputs.items())]
        internal: dict[str, Any] = {"buildKey": key.sha256}
        if key.backend is not None:
            internal["backend"] = key.backend
        return in_toto(
            self.outputs,
            {"stage": key.stage, "names": key.names, "options": key.options},
            [*inputs, *self.sources, *_packages(key)],
            internal,
            key.code,
        )

    def to_bytes(self) -> bytes:
        return dump_json(self.to_json()).encode()

    def save(self, path: str | os.PathLike) -> None:
        write_bytes(path, self.to_bytes())


def in_toto(
    outputs: Mapping[str, str],
    parameters: Mapping[str, Any],
    dependencies: Iterable[Mapping[str, Any]],
    internal: Mapping[str, Any] = {},
    code: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return a statement as JSON.

    outputs: {name: sha256}. parameters: given by the user. dependencies: in-toto's resource descriptors. internal:
    parameters that were derived. code: {folder of our packages: sha256}.
    """
    parts = _descriptors(code)
    predicate: dict[str, Any] = {
        "buildDefinition": {
            "buildType": MANUAL,
            "externalParameters": dict(parameters),
            "internalParameters": dict(internal),
            "resolvedDependencies": list(dependencies),
        },
        "runDetails": {"builder": {"id": MANUAL, "builderDependencies": parts}},
    }
    statement = {
        "_type": STATEMENT,
        "subject": _descriptors(outputs),
        "predicateType": PREDICATE,
        "predicate": predicate,
    }
    predicate[DIGEST] = sha256_json(statement)
    return statement


def _descriptors(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(digests.items())]


def subjects(descriptors: Any) -> dict[str, Any]:
    """Return {name: sha256} of descriptors. Raises LookupError or TypeError where one is invalid."""
    return {item["name"]: item["digest"]["sha256"] for item in descriptors}


def _packages(key: BuildKey) -> Iterator[dict[str, Any]]:
    """Yield descriptors of packages, and of a backend's libraries, which `from_json` tells by their annotations."""
    for name, _, url in package_urls(key.environment):
        yield {"name": name, "uri": url}
    for name, version, url in libraries(key):
        # OpenVINO is a package and the backend's library, and is listed once.
        if (name, version) not in key.environment.items():
            yield {"name": name, "uri": url, "annotations": {"of": "backend"}}


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


def statement_path(manifest: str | Path) -> Path:
    """Return the path of a manifest's statement: `assembly.statement.json` of `assembly.json`."""
    manifest = Path(manifest)
    return manifest.with_name(f"{manifest.stem}{SUFFIX}")
