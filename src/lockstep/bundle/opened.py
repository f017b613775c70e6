"""Opening of bundles: an archive in; paths of engines, assembly and weights out.

Every digest is checked. NumPy and the backend do the rest. Small files go to a temporary folder, which is gone when the
context ends: it may end as soon as the model is open. Weights stay in the archive, whose tensors a manifest of that
folder points to.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.bounds import Precision, Size
from lockstep.artifacts.document import JsonObject, ValidationError, matching
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.places import StoredFile
from lockstep.artifacts.weights import WeightsManifest
from lockstep.bundle.archive import MANIFEST, Archive, contents, read_archive
from lockstep.errors import InputError, LockstepError, interrupts
from lockstep.manifests.digest_cache import remember
from lockstep.targets import Limits, Target

_REMEDY = "make the bundle again"
ADAPTERS_JSON = "adapters/adapters.json"
_NEEDED = ("engines/engines.json", "graphs/assembly.json", "weights/weights.json")


@dataclass(frozen=True)
class _Target:
    """The target as the bundle's manifest has it."""

    model: Annotated[str, matching(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,255}", "a model's name")]
    precision: Precision
    layers: Literal["all"] | Size
    backend: Annotated[str, matching("[a-z_]+", "a backend's name")]


@dataclass(frozen=True)
class _Limits:
    """The limits as the bundle's manifest has them."""

    max_batch_size: Size
    max_input_len: Size
    max_seq_len: Size
    max_num_tokens: Size


@dataclass(frozen=True)
class _About(JsonObject):
    """What the bundle's manifest says besides its files."""

    target: _Target
    limits: _Limits
    weights: Literal["inside", "apart"]


@dataclass(frozen=True)
class Opened:
    """The paths that `runtime.Model.open` takes, and the limits to run with.

    adapters: the manifest of the model's adapters; None where it has none. checkpoint: its manifest; None for a bundle.
    """

    target: Target
    limits: Limits
    engines: Path
    assembly: Path
    weights: Path
    adapters: Path | None = None
    checkpoint: Path | None = None


@contextlib.contextmanager
def opened(path: str | os.PathLike, weights: str | os.PathLike | None = None) -> Iterator[Opened]:
    """Check a bundle and give what runs.

    weights: for one that holds none, the folder that its weights' files lie in, or a weights.json of the same shapes,
    such as a fine-tune's. Raises InputError, one line, for an archive that is not as it was packed, or weights that are
    not there.
    """
    archive = read_archive(path)
    about = _about(archive)
    if about.weights == "inside" and weights is not None:
        raise InputError(
            f"{path}: expected no --weights, for the bundle holds its own, found {weights}; "
            f"leave it out, or pack without weights"
        )
    if about.weights == "apart" and weights is None:
        raise InputError(
            f"{path}: expected --weights, for the bundle holds none; give the folder of "
            f"{_weights_of(about)}, or a weights.json"
        )
    with _scratch() as folder:
        digest = _extract(archive, folder)
        manifest = folder / "weights" / "weights.json"
        target = Target(**vars(about.target))
        _check_named(archive, folder, target)
        if about.weights == "inside":
            _point_into(archive, manifest, digest)
        else:
            assert weights is not None  # said above
            manifest = _bind(manifest, Path(weights))
        try:
            yield Opened(
                target,
                Limits(**vars(about.limits)),
                folder / "engines" / "engines.json",
                folder / "graphs" / "assembly.json",
                manifest,
                _adapters(archive, folder),
            )
        except LockstepError as error:
            # The folder is gone when a user reads of it.
            error.args = (str(error).replace(f"{folder}{os.sep}", f"{path}: "),)
            raise


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Give a new folder, which is removed at the end.

    When an interrupt hits the removal itself, it is removed at the end of the process.
    """
    folder = Path(tempfile.gettempdir(), f"lockstep-bundle-{secrets.token_hex(8)}")
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        with interrupts():
            remove()
        atexit.unregister(remove)


def _about(archive: Archive) -> _About:
    try:
        about = _About.from_json(archive.manifest.about)
    except ValidationError as error:
        raise InputError(f"{archive.path}: {MANIFEST}: {error}; {_REMEDY}") from None
    for name in _NEEDED:
        if name not in archive.members:
            raise InputError(f"{archive.path}: {MANIFEST}: expected {', '.join(_NEEDED)}, found no {name}; {_REMEDY}")
    return about


def _weights_of(about: _About) -> str:
    return f"the weights of {about.target.model} in {about.target.precision}"


def _extract(archive: Archive, folder: Path) -> str:
    """Check every byte of the archive and write all but the weights to `folder`. Returns the archive's hex sha256."""
    small = {name: member for name, member in archive.members.items() if not _is_weights(name)}
    needed = sum(member.size for member in small.values())
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    digest = hashlib.sha256()
    for member, pieces in contents(archive, digest):
        if member.name not in small:
            for _ in pieces:
                pass
            continue
        path = folder / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.writelines(pieces)
    return digest.hexdigest()


def _is_weights(name: str) -> bool:
    return name.startswith("weights/") and name != "weights/weights.json"


def _check_named(archive: Archive, folder: Path, target: Target) -> None:
    """Check that manifests are of the target and name files of the bundle only.

    These are engines, tokenizer and chat template.
    """
    assembly = Assembly.load(folder / "graphs" / "assembly.json")
    engines = EngineSetManifest.load(folder / "engines" / "engines.json")
    precisions = {"graphs/assembly.json": assembly.precision, "engines/engines.json": engines.precision}
    for name, found, expected in (
        *((name, found, target.precision) for name, found in precisions.items()),
        ("engines/engines.json", engines.backend, target.backend),
    ):
        if found != expected:
            raise InputError(
                f"{archive.path}: {name}: expected {expected}, as {MANIFEST} says, found {found}; {_REMEDY}"
            )
    names = [f"engines/{entry.file}" for entry in engines.engines.values()]
    texts = [f"graphs/{entry.file}" for entry in (assembly.tokenizer, assembly.chat_template) if entry]
    for name in [*names, *texts]:
        if name not in archive.members:
            raise InputError(f"{archive.path}: expected {name}, which a manifest in it names, found none; {_REMEDY}")


def _adapters(archive: Archive, folder: Path) -> Path | None:
    """Return the path of the bundle's manifest of adapters; None where it has none.

    Their files must all be of the bundle.
    """
    path = folder / ADAPTERS_JSON
    if ADAPTERS_JSON not in archive.members:
        return None
    for name, adapter in AdaptersManifest.load(path).adapters.items():
        for file in adapter.files:
            member = archive.members.get(f"adapters/{adapter.folder}/{file.path}")
            if member is None or member.sha256 != file.sha256:
                raise InputError(
                    f"{archive.path}: {ADAPTERS_JSON}: adapter {name!r}: expected its {file.path} in the bundle, found "
                    f"none; {_REMEDY}"
                )
    return path


def _point_into(archive: Archive, manifest_path: Path, digest: str) -> None:
    """Rewrite the weights' manifest: its one file is the archive."""
    manifest = WeightsManifest.load(manifest_path)
    members = {}
    for file in manifest.files:
        member = archive.members.get(f"weights/{file.path}")
        if member is None or (member.size, member.sha256) != (file.size, file.sha256):
            raise InputError(
                f"{archive.path}: expected weights/{file.path} of sha256 {file.sha256}, found none; {_REMEDY}"
            )
        members[file.path] = member
    whole, tensors = StoredFile(os.path.abspath(archive.path), archive.size, digest), {}
    for name, place in manifest.tensors.items():
        if place.offset + place.length > members[place.file].size:
            raise InputError(
                f"{archive.path}: weights/weights.json: expected tensor {name!r} within its "
                f"file, found {place.to_json()}; {_REMEDY}"
            )
        tensors[name] = replace(place, file=whole.path, offset=place.offset + members[place.file].offset)
    remember(archive.path, digest)  # just hashed: whoever opens the weights need not do it again
    WeightsManifest.of(manifest.precision, (whole,), tensors, manifest.group_size).save(manifest_path)


def _bind(manifest_path: Path, weights: Path) -> Path:
    """Return the path of the manifest of weights that lie outside of the bundle.

    It is `weights` itself, or that of the bundle, pointed to the folder `weights`.
    """
    if weights.is_file():
        return weights
    manifest = WeightsManifest.load(manifest_path)
    for file in manifest.files:
        name = Path(file.path).name
        if not (weights / name).is_file():
            found = "no such file" if weights.is_dir() else "no such folder"
            raise InputError(
                f"{weights}: expected {name} of {file.size} bytes, found {found}; give the "
                f"folder of the weights, or a weights.json"
            )
    manifest.moved(lambda path: os.path.abspath(weights / Path(path).name)).save(manifest_path)
    return manifest_path
