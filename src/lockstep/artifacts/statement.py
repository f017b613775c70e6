"""What an artefact was made of: an in-toto statement beside its manifest, with SLSA's provenance as predicate.

A Statement v1 (https://in-toto.io/Statement/v1) whose predicate is https://slsa.dev/provenance/v1, as plain JSON;
docs/statements.md says what its fields hold. It holds no time and no place: two machines that make the same of the same
write the same bytes. The predicate's extension field `lockstep_sha256` is the digest of all the rest.
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
CONTENT = "lockstep_content"  # a digest of what a manifest says, without the places in it
SUFFIX = ".statement.json"
_PART = "lockstep/"


@dataclass(frozen=True)
class _Backend:
    """What is read of a key's backend."""

    name: str
    device: Mapping[str, Any]


@dataclass(frozen=True)
class BuildKey(JsonObject):
    """The build key of a step: all that decides what it makes.

    names: the stage's wildcards. inputs: by name a value for each, mostly its sha256. options: plain JSON. code:
    digest of each module by its path. environment: version of each package. backend: its library and device, None of a
    stage without one.
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
        """Return the hex digest of the key, by which a cache finds what was made."""
        return sha256_json(self.to_json())


_read_outputs = reader(Mapping[PlainPath, Digest])


@dataclass(frozen=True)
class Statement:
    """A build key, and the sha256 of each file that came out, by path relative to the manifest.

    sources: descriptors of files that are no part of the key, for it holds digests of what names them.
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
                "code": {part.removeprefix(_PART): sha256 for part, sha256 in subjects(parts).items()},
                "environment": packages,
                "backend": definition["internalParameters"].get("backend"),
            }
            statement = cls(BuildKey.from_json(key), _read_outputs(subjects(value["subject"])), tuple(sources))
            is_whole = statement.to_json() == value
        except (LookupError, TypeError, AttributeError, ValueError):
            form = value.get("format") if isinstance(value, dict) else None
            raise ValidationError("", "an in-toto statement of a build", form or value) from None
        if not is_whole:
            raise ValidationError(DIGEST, "the digest of what the statement says", "another: the file is damaged")
        return statement

    def to_json(self) -> dict[str, Any]:
        key = self.key
        inputs = [{"name": name, "digest": {CONTENT: value}} for name, value in sorted(key.inputs.items())]
        backend = {} if key.backend is None else {"backend": key.backend}
        return in_toto(
            self.outputs,
            {"stage": key.stage, "names": key.names, "options": key.options},
            [*inputs, *self.sources, *_packages(key)],
            {"buildKey": key.sha256, **backend},
            key.code,
        )

    def to_bytes(self) -> bytes:
        return dump_json(self.to_json()).encode()

    def save(self, path: str | os.PathLike) -> None:
        """Write the file, whole or not at all."""
        write_bytes(path, self.to_bytes())


def in_toto(
    outputs: Mapping[str, str],
    parameters: Mapping[str, Any],
    dependencies: Iterable[Mapping[str, Any]],
    internal: Mapping[str, Any] = {},
    code: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return a statement as JSON.

    outputs: sha256 by name. parameters: what the user asked for. dependencies: descriptors of in-toto. internal: what
    followed from them. code: sha256 of parts of this package, by path.
    """
    parts = _descriptors({f"{_PART}{part}": sha256 for part, sha256 in code.items()})
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
    """Return the sha256 of each descriptor by its name. Raises LookupError or TypeError for what is none."""
    return {item["name"]: item["digest"]["sha256"] for item in descriptors}


def _packages(key: BuildKey) -> Iterator[dict[str, Any]]:
    """Yield descriptors of packages, and of a backend's libraries, whose versions the backend says too."""
    yield from ({"name": name, "uri": url} for name, _, url in package_urls(key.environment))
    for name, version, url in libraries(key):
        if (name, version) not in key.environment.items():
            yield {"name": name, "uri": url, "annotations": {"of": "backend"}}


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


def statement_path(manifest: str | Path) -> Path:
    """Return the path of a manifest's statement: `assembly.statement.json` of `assembly.json`."""
    manifest = Path(manifest)
    return manifest.with_name(f"{manifest.stem}{SUFFIX}")
