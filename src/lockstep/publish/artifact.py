"""Bundles in a registry: an OCI artifact of ModelPack's types (https://github.com/modelpack/model-spec).

A bundle in, a manifest and its layers in the registry out, and back to the same bytes. Layers are the engines, the
records and the assembly, the tokenizer, and each file of weights and adapters: what two models share is one blob.
Signatures beside the bundle refer to the manifest.
"""

from __future__ import annotations

import contextlib
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from lockstep.artifacts.document import ValidationError
from lockstep.artifacts.files import dump_json, sha256_file, write_bytes
from lockstep.bundle.archive import MANIFEST, Archive, BundleManifest, Entry, read_archive, write_archive, write_tar
from lockstep.errors import CheckError, InputError
from lockstep.provenance.lock import Lock, Published
from lockstep.publish.dsse import PAYLOAD_TYPE
from lockstep.publish.registry import IMAGE_INDEX, IMAGE_MANIFEST, Reference, Repository, is_digest, sha256_digest
from lockstep.publish.signature import check_contents, signature_path, statement_path
from lockstep.targets import Target

_MODEL = "application/vnd.cncf.model"
ARTIFACT = f"{_MODEL}.manifest.v1+json"
CONFIG = f"{_MODEL}.config.v1+json"
ENGINES = f"{_MODEL}.code.v1.tar"
RECORDS = f"{_MODEL}.weight.config.v1.tar"
TEXT = f"{_MODEL}.weight.config.v1.raw"
WEIGHTS = f"{_MODEL}.weight.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
_EMPTY = "application/vnd.oci.empty.v1+json"
# What stands beside a bundle, and its type as an artifact that refers to it.
_ATTACHED: dict[str, Callable[[Path], Path]] = {
    "application/vnd.dev.sigstore.bundle.v0.3+json": signature_path,
    PAYLOAD_TYPE: statement_path,
}
_LARGEST_TAR = 16 << 30  # bytes of engines or records
_LARGEST_ATTACHED = 16 << 20  # bytes of a signature or statement


@dataclass(frozen=True)
class Pushed:
    """A bundle in a registry. digest: of its manifest. uploaded: names of layers that the registry did not have."""

    reference: str
    digest: str
    uploaded: tuple[str, ...]


Layer = tuple[str, Entry]  # the media type of its content, and the content


def push(bundle: Path, reference: Reference, plain_http: bool = False) -> Pushed:
    """Push a bundle and what is signed of it. Its bytes are checked first; the same bundle is the same manifest."""
    check_contents(bundle)
    archive = read_archive(bundle)
    repository = Repository(reference, plain_http)
    with tempfile.TemporaryDirectory(prefix="lockstep-push-") as folder, tarfile.open(bundle) as tar:
        layers = _layers(archive, tar, Path(folder))
        uploaded = [entry.name for _, entry in layers if _upload(repository, entry)]
        config = _config(archive, layers)
        _upload(repository, Entry.of_bytes("", config))
        manifest = dump_json(
            {
                "schemaVersion": 2,
                "mediaType": IMAGE_MANIFEST,
                "artifactType": ARTIFACT,
                "config": {"mediaType": CONFIG, "digest": sha256_digest(config), "size": len(config)},
                "layers": [_descriptor(*layer) for layer in layers],
            }
        ).encode()
    repository.put_manifest(manifest, IMAGE_MANIFEST, reference.tag)
    subject = {"mediaType": IMAGE_MANIFEST, "digest": sha256_digest(manifest), "size": len(manifest)}
    for kind, path_of in _ATTACHED.items():
        if path_of(bundle).is_file():
            _attach(repository, subject, kind, path_of(bundle))
            uploaded.append(path_of(bundle).name)
    return Pushed(str(replace(reference, digest=None)), sha256_digest(manifest), tuple(uploaded))


def _layers(archive: Archive, tar: tarfile.TarFile, folder: Path) -> list[Layer]:
    """Return the layers of a bundle. tar: the bundle, open; folder: for those that are tar files themselves."""

    def entry(name: str) -> Entry:
        member = archive.members[name]
        return Entry(name, member.size, member.sha256, lambda: cast(BinaryIO, tar.extractfile(name)))

    members = archive.members
    engines = [name for name in members if name.startswith("engines/") and not name.endswith(".json")]
    raw = {name: TEXT for name in members if name.startswith("graphs/") and "tokenizer" in name}
    raw |= {name: WEIGHTS for name in members if name.startswith(("weights/", "adapters/"))}
    raw = {name: kind for name, kind in raw.items() if not name.endswith(("weights.json", "adapters.json"))}
    records = [name for name in members if name not in raw and name not in engines]
    first = Entry.of_bytes(MANIFEST, archive.manifest.to_bytes())
    return [
        (ENGINES, _tar("engines", archive.path, folder, map(entry, engines))),
        (RECORDS, _tar("records", archive.path, folder, [first, *map(entry, records)])),
        *((kind, entry(name)) for name, kind in sorted(raw.items())),
    ]


def _tar(name: str, bundle: Path, folder: Path, entries: Iterable[Entry]) -> Entry:
    path = folder / f"{name}.tar"
    with open(path, "wb") as out:
        write_tar(out, entries, bundle)
    return Entry.of_file(name, path, sha256_file(path))


def _descriptor(media_type: str, entry: Entry) -> dict[str, Any]:
    return {
        "mediaType": media_type,
        "digest": f"sha256:{entry.sha256}",
        "size": entry.size,
        "annotations": {FILE_PATH: entry.name},
    }


def _upload(repository: Repository, entry: Entry) -> bool:
    if repository.has_blob(f"sha256:{entry.sha256}"):
        return False
    with entry.open() as content:
        repository.put_blob(f"sha256:{entry.sha256}", entry.size, content)
    return True


def _config(archive: Archive, layers: list[Layer]) -> bytes:
    """Return ModelPack's configuration; it has no time, so that the same bundle is the same manifest."""
    target = archive.manifest.about.target
    title = "/".join(str(value) for _, value in sorted(vars(target).items()))
    config = {
        "descriptor": {"name": target.model, "title": title},
        "config": {"format": "lockstep", "precision": target.precision},
        "modelfs": {"type": "layers", "diffIds": [f"sha256:{entry.sha256}" for _, entry in layers]},
    }
    return dump_json(config).encode()


def _attach(repository: Repository, subject: Mapping[str, Any], kind: str, path: Path) -> None:
    """Push a file as an artifact that refers to `subject`, in place of an earlier one of its kind."""
    content = path.read_bytes()
    for data in (content, b"{}"):
        _upload(repository, Entry.of_bytes("", data))
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
    manifest = _manifest(data, reference)
    digest = sha256_digest(data)
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-pull-", dir=out.parent))
        entries: dict[str, Entry] = {}
        for layer in manifest["layers"]:
            name = layer["annotations"][FILE_PATH]
            sha256 = layer["digest"].removeprefix("sha256:")
            entry = Entry(name, layer["size"], sha256, _blob(repository, layer, name))
            if layer["mediaType"] not in (ENGINES, RECORDS):
                entries[name] = entry
                continue
            path = Path(folder) / f"{len(entries)}.tar"
            _download(entry, path)
            try:
                tar = opened.enter_context(tarfile.open(path, "r:"))
                # No link, which would lead to another, and no hole, which takes room that no registry has sent.
                regular = [info for info in tar if info.isreg() and not info.issparse()]
                entries |= {info.name: Entry(info.name, info.size, "", _file(tar, info)) for info in regular}
            except (tarfile.TarError, ValueError, OverflowError) as error:
                raise InputError(
                    f"{reference}: {name}: expected a tar archive, found: {error}; push the bundle again"
                ) from None
        first = entries.pop(MANIFEST, None)
        if first is None:
            raise InputError(f"{reference}: expected {MANIFEST} among the records, found none; push the bundle again")
        with first.open() as file:
            listed = _listed(file.read(), reference)
        if sorted(entries) != [file.path for file in listed.files]:
            raise InputError(
                f"{reference}: expected the files that {MANIFEST} lists, found others; push the bundle again"
            )
        files = [Entry(file.path, file.size, file.sha256, entries[file.path].open) for file in listed.files]
        attached = _attached(repository, digest)  # before a bundle is there
        write_archive(out, listed.about, files)  # which checks what is read
    for kind, path_of in _ATTACHED.items():
        if kind in attached:
            write_bytes(path_of(out), attached[kind])
        else:  # of an earlier bundle of this name
            path_of(out).unlink(missing_ok=True)
    return digest


def _manifest(data: bytes, reference: Reference) -> dict[str, Any]:
    try:
        manifest = json.loads(data)
        is_model = manifest["artifactType"] == ARTIFACT
        for layer in manifest["layers"]:
            is_model = is_model and isinstance(layer["size"], int) and isinstance(layer["annotations"][FILE_PATH], str)
            is_model = is_model and is_digest(layer["digest"]) and isinstance(layer["mediaType"], str)
    except (ValueError, LookupError, TypeError, RecursionError):
        is_model = False
    if not is_model:
        raise InputError(f"{reference}: expected a bundle as `lockstep push` made it, found another artifact")
    return manifest


def _listed(sealed: bytes, reference: Reference) -> BundleManifest:
    try:
        return BundleManifest.from_json(json.loads(sealed))
    except (ValueError, RecursionError, ValidationError) as error:
        raise InputError(f"{reference}: {MANIFEST}: {error}; push the bundle again") from None


def _blob(repository: Repository, layer: Mapping[str, Any], name: str) -> Callable[[], BinaryIO]:
    return lambda: cast(BinaryIO, repository.open_blob(layer["digest"], layer["size"], name))


def _file(tar: tarfile.TarFile, info: tarfile.TarInfo) -> Callable[[], BinaryIO]:
    return lambda: cast(BinaryIO, tar.extractfile(info))


def _download(entry: Entry, path: Path) -> None:
    if entry.size > _LARGEST_TAR:
        raise InputError(f"{entry.name}: expected a layer of at most 16 GiB, found {entry.size} bytes; refused")
    with entry.open() as blob, open(path, "wb") as out:
        while piece := blob.read(1 << 20):
            out.write(piece)


def _attached(repository: Repository, digest: str) -> dict[str, bytes]:
    """Return what is signed of a manifest, by its kind. Raises InputError for what is none, CheckError for damage."""
    found = {}
    for entry in repository.get_referrers(digest):
        kind = str(entry.get("artifactType"))
        data = repository.get_manifest(entry["digest"]) if kind in _ATTACHED else None
        if data is None:
            continue
        try:
            (layer,) = json.loads(data)["layers"]
            size = layer["size"]
            blob = layer["digest"]
        except (ValueError, LookupError, TypeError, RecursionError):
            size = None
            blob = ""
        if type(size) is not int or not 0 < size <= _LARGEST_ATTACHED or not is_digest(blob):
            expected = f"one layer of at most {_LARGEST_ATTACHED >> 20} MiB"
            raise InputError(f"{repository.reference}: {kind}: expected {expected}, found another; sign it again")
        with repository.open_blob(blob, size, kind) as content:
            found[kind] = b""
            while piece := content.read(1 << 20):
                found[kind] += piece
    return found


def note_in_lock(lock_path: Path, bundle: Path, pushed: Pushed) -> None:
    """Name a pushed bundle in the lock of its model. Raises CheckError where its engines are not the locked ones."""
    archive = read_archive(bundle)
    lock = Lock.load(lock_path)
    target = Target(**vars(archive.manifest.about.target))
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
