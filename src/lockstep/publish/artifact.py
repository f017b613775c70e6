"""Bundles in an OCI registry, as artifacts of ModelPack's types (https://github.com/modelpack/model-spec).

A bundle in, a manifest and its layers in the registry out, and back to the same bytes. Each file of the bundle is a
layer: what two models share is one blob. Signatures of the bundle refer to the manifest.
"""

from __future__ import annotations

import functools
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from lockstep.artifacts.document import ValidationError
from lockstep.artifacts.files import dump_json, write_bytes
from lockstep.bundle.archive import MANIFEST, Archive, BundleManifest, Entry, read_archive, write_archive
from lockstep.errors import CheckError, InputError
from lockstep.provenance.lock import Lock, Published
from lockstep.publish.dsse import PAYLOAD_TYPE
from lockstep.publish.registry import Descriptor, Index, Manifest, Reference, Repository
from lockstep.publish.signature import envelope_path, read_engine_statement, signature_path
from lockstep.targets import Target

# Media types of ModelPack: engines are its code, tokenizers and manifests its text.
_MODEL = "application/vnd.cncf.model"
ARTIFACT = f"{_MODEL}.manifest.v1+json"
CONFIG = f"{_MODEL}.config.v1+json"
ENGINES = f"{_MODEL}.code.v1.raw"
TEXT = f"{_MODEL}.weight.config.v1.raw"
WEIGHTS = f"{_MODEL}.weight.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
_EMPTY = "application/vnd.oci.empty.v1+json"
# The signed files next to a bundle: the artifact type under which each refers to it.
ATTACHED: dict[str, Callable[[Path], Path]] = {
    "application/vnd.dev.sigstore.bundle.v0.3+json": signature_path,
    PAYLOAD_TYPE: envelope_path,
}
_LARGEST_TEXT = 16 << 20  # bytes of a bundle's manifest, a signature or a statement


@dataclass(frozen=True)
class Pushed:
    """A bundle in a registry. digest: of its manifest. uploaded: names of files that the registry did not have."""

    reference: str
    digest: str
    uploaded: tuple[str, ...]


def push(bundle: Path, reference: Reference, plain_http: bool = False) -> Pushed:
    """Push a bundle and its signed files. Its bytes are checked first; the same bundle is the same manifest."""
    # Only for its checks: others will trust the bundle.
    read_engine_statement(bundle)
    archive = read_archive(bundle)
    repository = Repository(reference, plain_http)
    with tarfile.open(bundle) as tar:
        files = [Entry.of_bytes(MANIFEST, archive.manifest.to_bytes())]
        for name, member in archive.members.items():
            content = functools.partial(tar.extractfile, name)
            files.append(Entry(name, member.size, member.sha256, cast(Callable[[], BinaryIO], content)))
        layers = tuple(_layer(file) for file in files)
        uploaded = [
            file.name for file, layer in zip(files, layers) if repository.put_blob(layer.digest, layer.size, file.open)
        ]
    config = _put(repository, CONFIG, _config(archive, layers))
    # After its blobs: a registry rejects a manifest that names an unknown blob.
    subject, _ = repository.put_manifest(Manifest(ARTIFACT, config, layers), reference.tag)
    for kind, path_of in ATTACHED.items():
        if path_of(bundle).is_file():
            _attach(repository, subject, kind, path_of(bundle))
            uploaded.append(path_of(bundle).name)
    return Pushed(str(replace(reference, digest=None)), subject.digest, tuple(uploaded))


def _layer(file: Entry) -> Descriptor:
    media_type = WEIGHTS
    if file.name.endswith(".json") or file.name.startswith("graphs/"):
        media_type = TEXT
    elif file.name.startswith("engines/"):
        media_type = ENGINES
    return Descriptor(media_type, f"sha256:{file.sha256}", file.size, {FILE_PATH: file.name})


def _put(repository: Repository, media_type: str, data: bytes) -> Descriptor:
    entry = Entry.of_bytes("", data)
    repository.put_blob(f"sha256:{entry.sha256}", entry.size, entry.open)
    return Descriptor.of(media_type, data)


def _config(archive: Archive, layers: tuple[Descriptor, ...]) -> bytes:
    """Return ModelPack's configuration; it has no time, so that the same bundle is the same manifest."""
    target = archive.manifest.about.target
    title = "/".join(str(value) for _, value in sorted(vars(target).items()))
    config = {
        "descriptor": {"name": target.model, "title": title},
        "config": {"format": "lockstep", "precision": target.precision},
        "modelfs": {"type": "layers", "diffIds": [layer.digest for layer in layers]},
    }
    return dump_json(config).encode()


def _attach(repository: Repository, subject: Descriptor, kind: str, path: Path) -> None:
    """Push a file as an artifact that refers to `subject`, in place of an earlier one of its kind."""
    content = _put(repository, kind, path.read_bytes())
    config = _put(repository, _EMPTY, b"{}")
    attached, headers = repository.put_manifest(Manifest(kind, config, (content,), subject))
    if "OCI-Subject" in headers:
        return
    # A registry older than OCI 1.1 has no referrers API: an index under a tag takes its place.
    referrers = (entry for entry in repository.get_referrers(subject.digest) if entry.artifact_type != kind)
    index = Index((*referrers, replace(attached, artifact_type=kind)))
    repository.put_manifest(index, subject.digest.replace(":", "-"))


def pull(reference: Reference, out: Path, plain_http: bool = False) -> str:
    """Write the bundle that a reference names to `out`, with its signatures next to it; return its digest.

    The bundle has the bytes that were pushed. Raises CheckError for content of another digest, InputError for an
    artifact that is no bundle.
    """
    repository = Repository(reference, plain_http)
    pulled = repository.get_manifest(reference.digest or reference.tag, "a bundle as `lockstep push` made it")
    if pulled is None:
        raise InputError(f"{reference}: expected a bundle, found none; push it with `lockstep push`")
    manifest, digest = pulled
    layers = {layer.annotations.get(FILE_PATH, ""): layer for layer in manifest.layers}
    if manifest.artifact_type != ARTIFACT or MANIFEST not in layers:
        raise InputError(
            f"{reference}: expected a bundle with {MANIFEST}, as this version of `lockstep push` makes it, found "
            "another artifact; push it again"
        )
    first = repository.read_blob(layers.pop(MANIFEST), MANIFEST, _LARGEST_TEXT)
    try:
        listed = BundleManifest.from_json(json.loads(first))
    except (ValueError, RecursionError, ValidationError) as error:
        raise InputError(f"{reference}: {MANIFEST}: {error}; push the bundle again") from None
    # Check before downloading gigabytes.
    expected = {file.path: (file.size, f"sha256:{file.sha256}") for file in listed.files}
    if {name: (layer.size, layer.digest) for name, layer in layers.items()} != expected:
        raise InputError(f"{reference}: expected the files that {MANIFEST} lists, found others; push the bundle again")
    files = []
    for file in listed.files:
        content = functools.partial(repository.open_blob, layers[file.path], file.path)
        files.append(Entry(file.path, file.size, file.sha256, cast(Callable[[], BinaryIO], content)))
    # Fetched first, so that an error leaves no bundle without its signatures.
    attached = _attached(repository, digest)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_archive(out, listed.about, files)
    for kind, path_of in ATTACHED.items():
        if kind in attached:
            write_bytes(path_of(out), attached[kind])
        else:  # of an earlier bundle of this name
            path_of(out).unlink(missing_ok=True)
    return digest


def _attached(repository: Repository, digest: str) -> dict[str, bytes]:
    """Return {kind: content} of a manifest's signed files. Raises InputError or CheckError where one is invalid."""
    contents = {}
    for entry in repository.get_referrers(digest):
        kind = entry.artifact_type
        if kind not in ATTACHED:
            continue
        expected = f"{kind} of one layer"
        signed = repository.get_manifest(entry.digest, expected)
        if signed is None:  # it has been deleted, and is listed still
            continue
        manifest, _ = signed
        if len(manifest.layers) != 1:
            raise InputError(
                f"{repository.reference}: expected {expected}, found {len(manifest.layers)}; sign it again"
            )
        contents[kind] = repository.read_blob(manifest.layers[0], kind, _LARGEST_TEXT)
    return contents


def note_in_lock(lock_path: Path, bundle: Path, pushed: Pushed) -> None:
    """Name a pushed bundle in the lock of its model. Raises CheckError where its engines are not the locked ones."""
    archive = read_archive(bundle)
    lock = Lock.load(lock_path)
    target = Target(**vars(archive.manifest.about.target))
    if target.model != lock.model:
        raise InputError(f"{lock_path}: expected the lock of {target.model}, found that of {lock.model}; name its lock")
    engines = {
        name.partition("/")[2]: member.sha256
        for name, member in archive.members.items()
        if name.startswith("engines/") and not name.endswith(".json")
    }
    # A lock lists the engines of several devices; a bundle has those of one, and for a cut model only some.
    locked = lock.devices(target.precision, target.backend)
    if not any(engines.items() <= items.items() for items in locked.values()):
        raise CheckError(f"{lock_path}: expected the engines of {bundle}, found others; run `lockstep lock` first")
    entry = Published(pushed.reference, pushed.digest)
    replace(lock, published={**lock.published, str(target): entry}).save(lock_path)


def locked_reference(lock_path: Path, reference: Reference) -> Reference:
    """Return a reference by the digest that a lock has for it. Raises InputError where it has none."""
    name = str(replace(reference, digest=None))
    for entry in Lock.load(lock_path).published.values():
        if entry.reference == name:
            return replace(reference, digest=entry.digest)
    raise InputError(f"{lock_path}: expected the digest of {name}, found none; write it with `lockstep push --lock`")
