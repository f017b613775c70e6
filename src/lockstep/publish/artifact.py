"""Bundles in a registry: an OCI artifact of ModelPack's types (https://github.com/modelpack/model-spec).

A bundle in, a manifest and its layers in the registry out, and back to the same bytes. Layers are the engines, the
records and the assembly, the tokenizer, and each file of weights and adapters: what two models share is one blob.
Signatures beside the bundle refer to the manifest.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from lockstep.artifacts.document import ValidationError
from lockstep.artifacts.files import atomic_path, dump_json, sha256_file
from lockstep.bundle.archive import (
    MANIFEST,
    Archive,
    BundleManifest,
    Entry,
    Member,
    read_archive,
    write_archive,
    write_tar,
)
from lockstep.errors import CheckError, InputError
from lockstep.provenance.lock import Lock, Published
from lockstep.publish.dsse import PAYLOAD_TYPE
from lockstep.publish.registry import IMAGE_INDEX, IMAGE_MANIFEST, Reference, Repository, sha256_digest
from lockstep.publish.signature import check_contents, signature_path, statement_path
from lockstep.targets import Target

_MODEL = "application/vnd.cncf.model"
ARTIFACT = f"{_MODEL}.manifest.v1+json"
CONFIG = f"{_MODEL}.config.v1+json"
ENGINES, RECORDS = f"{_MODEL}.code.v1.tar", f"{_MODEL}.weight.config.v1.tar"
TEXT, WEIGHTS = f"{_MODEL}.weight.config.v1.raw", f"{_MODEL}.weight.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
_EMPTY = "application/vnd.oci.empty.v1+json"
# What stands beside a bundle, and its type as an artifact that refers to it.
_ATTACHED: dict[str, Callable[[Path], Path]] = {
    "application/vnd.dev.sigstore.bundle.v0.3+json": signature_path,
    PAYLOAD_TYPE: statement_path,
}
_LARGEST_TAR = 16 << 30  # bytes of engines or records


@dataclass(frozen=True)
class Pushed:
    """A bundle in a registry. digest: of its manifest. uploaded: names of layers that the registry did not have."""

    reference: str
    digest: str
    uploaded: tuple[str, ...]


@dataclass(frozen=True)
class _Layer:
    """A layer: the media type, name and size of its content, its digest, and what opens it."""

    media_type: str
    name: str
    size: int
    digest: str
    open: Callable[[], BinaryIO]

    def descriptor(self) -> dict[str, Any]:
        return {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
            "annotations": {FILE_PATH: self.name},
        }


def push(bundle: Path, reference: Reference, plain_http: bool = False) -> Pushed:
    """Push a bundle and what is signed of it. Its bytes are checked first; the same bundle is the same manifest."""
    check_contents(bundle)
    archive, repository = read_archive(bundle), Repository(reference, plain_http)
    with tempfile.TemporaryDirectory(prefix="lockstep-push-") as folder:
        layers = _layers(archive, Path(folder))
        uploaded = [layer.name for layer in layers if _upload(repository, layer)]
        config = _config(archive, layers)
        _upload_bytes(repository, config)
        manifest = dump_json(
            {
                "schemaVersion": 2,
                "mediaType": IMAGE_MANIFEST,
                "artifactType": ARTIFACT,
                "config": {"mediaType": CONFIG, "digest": sha256_digest(config), "size": len(config)},
                "layers": [layer.descriptor() for layer in layers],
            }
        ).encode()
    repository.put_manifest(manifest, IMAGE_MANIFEST, reference.tag)
    subject = {"mediaType": IMAGE_MANIFEST, "digest": sha256_digest(manifest), "size": len(manifest)}
    for kind, path_of in _ATTACHED.items():
        if path_of(bundle).is_file():
            _attach(repository, subject, kind, path_of(bundle))
            uploaded.append(path_of(bundle).name)
    return Pushed(str(replace(reference, digest=None)), sha256_digest(manifest), tuple(uploaded))


def _layers(archive: Archive, folder: Path) -> list[_Layer]:
    members = archive.members
    engines = [name for name in members if name.startswith("engines/") and not name.endswith(".json")]
    raw = {name: TEXT for name in members if name.startswith("graphs/") and "tokenizer" in name}
    raw |= {name: WEIGHTS for name in members if name.startswith(("weights/", "adapters/"))}
    raw = {name: kind for name, kind in raw.items() if not name.endswith(("weights.json", "adapters.json"))}
    records = [name for name in members if name not in raw and name not in engines]
    first = Entry.of_bytes(MANIFEST, archive.manifest.to_bytes())
    return [
        _tar(ENGINES, "engines", archive.path, folder, [_entry(archive, members[name]) for name in engines]),
        _tar(RECORDS, "records", archive.path, folder, [first, *(_entry(archive, members[name]) for name in records)]),
        *(
            _Layer(kind, name, members[name].size, f"sha256:{members[name].sha256}", _opener(archive, members[name]))
            for name, kind in sorted(raw.items())
        ),
    ]


def _tar(media_type: str, name: str, bundle: Path, folder: Path, entries: list[Entry]) -> _Layer:
    path = folder / f"{name}.tar"
    with open(path, "wb") as out:
        write_tar(out, entries, bundle)
    return _Layer(media_type, name, path.stat().st_size, f"sha256:{sha256_file(path)}", lambda: open(path, "rb"))


def _entry(archive: Archive, member: Member) -> Entry:
    return Entry(member.name, member.size, member.sha256, _opener(archive, member))


def _opener(archive: Archive, member: Member) -> Callable[[], BinaryIO]:
    return lambda: cast(BinaryIO, _Part(archive.path, member.offset, member.size))


class _Part(io.RawIOBase):
    """A part of a file, to read from its start to its end."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file, self._left = open(path, "rb"), size
        self._file.seek(offset)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def _upload(repository: Repository, layer: _Layer) -> bool:
    if repository.has_blob(layer.digest):
        return False
    with layer.open() as content:
        repository.put_blob(layer.digest, layer.size, content)
    return True


def _upload_bytes(repository: Repository, data: bytes) -> None:
    _upload(repository, _Layer("", "", len(data), sha256_digest(data), lambda: io.BytesIO(data)))


def _config(archive: Archive, layers: list[_Layer]) -> bytes:
    """Return ModelPack's configuration; it has no time, so that the same bundle is the same manifest."""
    target = archive.manifest.about["target"]
    config = {
        "descriptor": {"name": target["model"], "title": "/".join(map(str, target.values()))},
        "config": {"format": "lockstep", "precision": target["precision"]},
        "modelfs": {"type": "layers", "diffIds": [layer.digest for layer in layers]},
    }
    return dump_json(config).encode()


def _attach(repository: Repository, subject: Mapping[str, Any], kind: str, path: Path) -> None:
    """Push a file as an artifact that refers to `subject`, in place of an earlier one of its kind."""
    content = path.read_bytes()
    for data in (content, b"{}"):
        _upload_bytes(repository, data)
    manifest = dump_json(
        {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            "artifactType": kind,
            "config": {"mediaType": _EMPTY, "digest": sha256_digest(b"{}"), "size": 2},
            "layers": [{"mediaType": kind, "digest": sha256_digest(content), "size": len(content)}],
            "subject": subject,
        }
    ).encode()
    if "OCI-Subject" in repository.put_manifest(manifest, IMAGE_MANIFEST):
        return
    # A registry of before OCI 1.1 has no referrers: an index below a tag stands in for them.
    others = [entry for entry in repository.get_referrers(subject["digest"]) if entry.get("artifactType") != kind]
    described = {"mediaType": IMAGE_MANIFEST, "digest": sha256_digest(manifest), "size": len(manifest)}
    index = {"schemaVersion": 2, "mediaType": IMAGE_INDEX, "manifests": [*others, {**described, "artifactType": kind}]}
    repository.put_manifest(dump_json(index).encode(), IMAGE_INDEX, subject["digest"].replace(":", "-"))


def pull(reference: Reference, out: Path, plain_http: bool = False) -> str:
    """Write the bundle that a reference names to `out`, and what is signed of it beside it; return its digest.

    The bundle has the bytes that were pushed. Raises CheckError for what is not of its digest, InputError for what is
    no bundle.
    """
    repository = Repository(reference, plain_http)
    data = repository.get_manifest(reference.digest or reference.tag)
    if data is None:
        raise InputError(f"{reference}: expected a bundle, found none; push it with `lockstep push`")
    manifest, digest = _manifest(data, reference), sha256_digest(data)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-pull-", dir=out.parent) as folder:
        entries: dict[str, Entry] = {}
        for layer in manifest["layers"]:
            name = layer["annotations"][FILE_PATH]
            if layer["mediaType"] in (ENGINES, RECORDS):
                path = Path(folder) / f"{len(entries)}.tar"
                _download(repository, layer, name, path)
                entries |= _in_tar(path, f"{reference}: {name}")
            else:
                sha256 = layer["digest"].removeprefix("sha256:")
                entries[name] = Entry(name, layer["size"], sha256, _blob(repository, layer, name))
        first = entries.pop(MANIFEST, None)
        if first is None:
            raise InputError(f"{reference}: expected {MANIFEST} among the records, found none; push the bundle again")
        with first.open() as file:
            sealed = file.read()
        about = _about(sealed, reference)
        if sorted(entries) != [listed.path for listed in about.files]:
            raise InputError(
                f"{reference}: expected the files that {MANIFEST} lists, found others; push the bundle again"
            )
        write_archive(out, about.about, [_expected(listed, entries[listed.path]) for listed in about.files])
    _pull_attached(repository, digest, out)
    return digest


def _manifest(data: bytes, reference: Reference) -> dict[str, Any]:
    try:
        manifest = json.loads(data)
        is_model = manifest["artifactType"] == ARTIFACT
        for layer in manifest["layers"]:
            is_model = is_model and isinstance(layer["size"], int) and isinstance(layer["annotations"][FILE_PATH], str)
            is_model = is_model and isinstance(layer["digest"], str) and isinstance(layer["mediaType"], str)
    except (ValueError, LookupError, TypeError, RecursionError):
        is_model = False
    if not is_model:
        raise InputError(f"{reference}: expected a bundle as `lockstep push` made it, found another artifact")
    return manifest


def _about(sealed: bytes, reference: Reference) -> BundleManifest:
    try:
        return BundleManifest.from_json(json.loads(sealed))
    except (ValueError, RecursionError, ValidationError) as error:
        raise InputError(f"{reference}: {MANIFEST}: {error}; push the bundle again") from None


def _expected(listed: Any, entry: Entry) -> Entry:
    """Return an entry as the bundle's manifest lists it: `write_archive` checks what is read."""
    return Entry(listed.path, listed.size, listed.sha256, entry.open)


def _blob(repository: Repository, layer: Mapping[str, Any], name: str) -> Callable[[], BinaryIO]:
    return lambda: cast(BinaryIO, repository.open_blob(layer["digest"], layer["size"], name))


def _download(repository: Repository, layer: Mapping[str, Any], name: str, path: Path) -> None:
    if layer["size"] > _LARGEST_TAR:
        raise InputError(f"{name}: expected a layer of at most 16 GiB, found {layer['size']} bytes; refused")
    with repository.open_blob(layer["digest"], layer["size"], name) as blob, open(path, "wb") as out:
        while piece := blob.read(1 << 20):
            out.write(piece)


def _in_tar(path: Path, where: str) -> dict[str, Entry]:
    """Return the files of a layer by name; nothing is unpacked."""
    entries = {}
    try:
        with tarfile.open(path) as tar:
            for info in tar:
                entries[info.name] = Entry(info.name, info.size, "", _part(path, info))
    except tarfile.TarError as error:
        raise InputError(f"{where}: expected a tar archive, found: {error}; push the bundle again") from None
    return entries


def _part(path: Path, info: tarfile.TarInfo) -> Callable[[], BinaryIO]:
    return lambda: cast(BinaryIO, _Part(path, info.offset_data, info.size))


def _pull_attached(repository: Repository, digest: str, out: Path) -> None:
    for path_of in _ATTACHED.values():
        with contextlib.suppress(FileNotFoundError):  # of an earlier bundle of this name
            path_of(out).unlink()
    for entry in repository.get_referrers(digest):
        kind = str(entry.get("artifactType"))
        data = repository.get_manifest(entry["digest"]) if kind in _ATTACHED else None
        if data is None:
            continue
        path = _ATTACHED[kind](out)
        (layer,) = json.loads(data)["layers"]
        with atomic_path(path) as temporary:
            _download(repository, layer, path.name, Path(temporary))


def note_in_lock(lock_path: Path, bundle: Path, pushed: Pushed) -> None:
    """Name a pushed bundle in the lock of its model. Raises CheckError where its engines are not the locked ones."""
    archive, lock = read_archive(bundle), Lock.load(lock_path)
    target = Target(**archive.manifest.about["target"])
    if target.model != lock.model:
        raise InputError(f"{lock_path}: expected the lock of {target.model}, found that of {lock.model}")
    engines = {
        name.partition("/")[2]: member.sha256
        for name, member in archive.members.items()
        if name.startswith("engines/") and not name.endswith(".json")
    }
    locked = lock.devices(target.precision, target.backend)
    if not any(engines.items() <= items.items() for items in locked.values()):
        raise CheckError(f"{lock_path}: expected the engines of {bundle}, found others; run `lockstep lock` first")
    entry = Published(pushed.reference, pushed.digest)
    replace(lock, published={**lock.published, str(target): entry}).save(lock_path)


def locked_reference(lock_path: Path, reference: Reference) -> Reference:
    """Return a reference by the digest that a lock has for it. Raises InputError where it has none."""
    wanted = str(replace(reference, digest=None))
    for entry in Lock.load(lock_path).published.values():
        if entry.reference == wanted:
            return replace(reference, digest=entry.digest)
    raise InputError(f"{lock_path}: expected the digest of {wanted}, found none; write it with `lockstep push --lock`")
