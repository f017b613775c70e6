"""Opening of bundles: an archive in; paths of engines, assembly and weights out.

Every digest is checked. Small files go to a temporary folder, which is removed when the context ends: it may end as
soon as the model is open. Weights stay in the archive: the folder's manifest of weights points into it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.places import StoredFile
from lockstep.artifacts.weights import WeightsManifest
from lockstep.bundle.archive import MANIFEST, Archive, check_contents, read_archive
from lockstep.errors import InputError, LockstepError, interrupts
from lockstep.manifests.digest_cache import remember
from lockstep.targets import Limits, Target

_REMEDY = "make the bundle again"
_NEEDED = ("engines/engines.json", "graphs/assembly.json", "weights/weights.json")
ADAPTERS_JSON = "adapters/adapters.json"


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
    """Check a bundle and yield the paths to run it.

    weights: for a bundle without weights, the folder with its weights' files, or a weights.json of the same shapes,
    such as a fine-tune's. Raises InputError for a damaged archive, or missing weights.
    """
    archive = read_archive(path)
    about = archive.manifest.about
    if about.weights == "inside" and weights is not None:
        raise InputError(
            f"{path}: expected no --weights, for the bundle holds its own, found {weights}; "
            f"leave it out, or pack without weights"
        )
    if about.weights == "apart" and weights is None:
        raise InputError(
            f"{path}: expected --weights, for the bundle holds none; give the folder of the weights of "
            f"{about.target.model} in {about.target.precision}, or a weights.json"
        )
    with _scratch() as folder:
        # Check every byte before anything is extracted.
        digest = check_contents(archive)
        with tarfile.open(archive.path) as tar:
            tar.extractall(folder, (info for info in tar if not _is_weights(info.name)), filter="data")
        try:
            manifest = folder / "weights" / "weights.json"
            _check_manifests(archive, folder)
            if weights is None:
                point_into(archive, manifest, digest)
            else:
                manifest = _weights_outside(manifest, Path(weights))
            yield Opened(
                Target(**vars(about.target)),
                Limits(**vars(about.limits)),
                folder / "engines" / "engines.json",
                folder / "graphs" / "assembly.json",
                manifest,
                folder / ADAPTERS_JSON if ADAPTERS_JSON in archive.members else None,
            )
        except LockstepError as error:
            # The folder is gone by the time a user reads the message: name the bundle instead.
            error.args = (str(error).replace(f"{folder}{os.sep}", f"{path}: "),)
            raise


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a new folder, removed afterwards, or at the process's end where an interrupt hits the removal."""
    folder = Path(tempfile.gettempdir(), f"lockstep-bundle-{secrets.token_hex(8)}")
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    # Registered before the folder exists, so that no interrupt can come in between.
    atexit.register(remove)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        with interrupts():
            remove()
        atexit.unregister(remove)


def _is_weights(name: str) -> bool:
    return name.startswith("weights/") and name != "weights/weights.json"


def _check_manifests(archive: Archive, folder: Path) -> None:
    """Check that manifests are of the target, and that each file that they name is in the bundle."""
    target = archive.manifest.about.target
    for name in _NEEDED:
        if name not in archive.members:
            raise InputError(f"{archive.path}: expected {name} in it, found none; {_REMEDY}")
    assembly = Assembly.load(folder / "graphs" / "assembly.json")
    engines = EngineSetManifest.load(folder / "engines" / "engines.json")
    for name, actual, expected in (
        ("graphs/assembly.json", assembly.precision, target.precision),
        ("engines/engines.json", engines.precision, target.precision),
        ("engines/engines.json", engines.backend, target.backend),
    ):
        if actual != expected:
            raise InputError(
                f"{archive.path}: {name}: expected {expected}, as {MANIFEST} says, found {actual}; {_REMEDY}"
            )
    for name, sha256 in _named_files(archive, folder, assembly, engines):
        if name not in archive.members or archive.members[name].sha256 != sha256:
            raise InputError(
                f"{archive.path}: expected {name} of sha256 {sha256}, which a manifest in it names, found none; "
                f"{_REMEDY}"
            )


def _named_files(
    archive: Archive, folder: Path, assembly: Assembly, engines: EngineSetManifest
) -> Iterator[tuple[str, str]]:
    """Yield name and sha256 of each file that a manifest names."""
    for engine in engines.engines.values():
        yield f"engines/{engine.file}", engine.sha256
    for text in (assembly.tokenizer, assembly.chat_template):
        if text:
            yield f"graphs/{text.file}", text.sha256
    if archive.manifest.about.weights == "inside":
        for file in WeightsManifest.load(folder / "weights" / "weights.json").files:
            yield f"weights/{file.path}", file.sha256
    if ADAPTERS_JSON in archive.members:
        for adapter in AdaptersManifest.load(folder / ADAPTERS_JSON).adapters.values():
            for file in adapter.files:
                yield f"adapters/{adapter.folder}/{file.path}", file.sha256


def point_into(archive: Archive, manifest_path: Path, digest: str) -> None:
    """Rewrite the weights' manifest to read its tensors from the archive, whose sha256 is `digest`."""
    manifest = WeightsManifest.load(manifest_path)
    archive_file = StoredFile(os.path.abspath(archive.path), archive.size, digest)
    tensors = {}
    for name, place in manifest.tensors.items():
        member = archive.members[f"weights/{place.file}"]
        # Else a damaged manifest would read the bytes of another file of the archive.
        if place.offset + place.length > member.size:
            raise InputError(
                f"{archive.path}: weights/weights.json: expected tensor {name!r} within its "
                f"file, found {place.to_json()}; {_REMEDY}"
            )
        tensors[name] = replace(place, file=archive_file.path, offset=place.offset + member.offset)
    # Just hashed: whoever opens the weights need not do it again.
    remember(archive.path, digest)
    WeightsManifest.of(manifest.precision, (archive_file,), tensors, manifest.group_size).save(manifest_path)


def _weights_outside(manifest_path: Path, weights: Path) -> Path:
    """Return the manifest of weights outside the bundle: `weights`, or the bundle's with paths in that folder."""
    if weights.is_file():
        return weights
    manifest = WeightsManifest.load(manifest_path)
    for file in manifest.files:
        name = Path(file.path).name
        if not (weights / name).is_file():
            reason = "no such folder"
            if weights.is_dir():
                reason = "no such file"
            raise InputError(
                f"{weights}: expected {name} of {file.size} bytes, found {reason}; give the "
                f"folder of the weights, or a weights.json"
            )
    manifest.moved(lambda path: os.path.abspath(weights / Path(path).name)).save(manifest_path)
    return manifest_path
