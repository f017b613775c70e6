"""Open a bundle: an archive in; paths of engines, assembly and weights out, once every digest is checked. NumPy and the backend do the rest.

Small files go to a temporary folder, which is gone when the context ends: it may end as soon as the model is open. Weights stay in the archive, whose
tensors a manifest of that folder points to.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import formats
from lockstep.bundle.archive import MANIFEST, Archive, contents, read_archive
from lockstep.errors import InputError, interrupts
from lockstep.files import read_json, write_json
from lockstep.paths import Target
from lockstep.seen import remember
from lockstep.sidefiles import named_files

_NEEDED = ("engines/engines.json", "graphs/assembly.json", "weights/weights.json")


@dataclass(frozen=True)
class Opened:
    """What `runtime.Model.open` takes. limits: max_batch_size, max_seq_len, max_num_tokens, max_input_len."""

    target: Target
    limits: Mapping[str, int]
    engines: Path
    assembly: Path
    weights: Path


@contextlib.contextmanager
def opened(path: str | os.PathLike, weights: str | os.PathLike | None = None) -> Iterator[Opened]:
    """Check a bundle and give what runs. weights: for one that holds none, the folder that its weights' files lie in, or a weights.json of the same
    shapes, such as a fine-tune's. Raises InputError, one line, for an archive that is not as it was packed, or weights that are not there."""
    archive = read_archive(path)
    about = _about(archive)
    if about["weights"] == "inside" and weights is not None:
        raise InputError(f"{path}: expected no --weights, for the bundle holds its own, found {weights}; leave it out, or pack without weights")
    if about["weights"] == "apart" and weights is None:
        raise InputError(f"{path}: expected --weights, for the bundle holds none; give the folder of {_weights_of(about)}, or a weights.json")
    with _scratch() as folder:
        digest = _extract(archive, folder)
        manifest = folder / "weights" / "weights.json"
        try:
            _check_named(archive, folder)
            if about["weights"] == "inside":
                _point_into(archive, manifest, digest)
            else:
                manifest = _bind(manifest, Path(weights))
        except (LookupError, TypeError, AttributeError):
            raise InputError(f"{path}: expected manifests as the stages write them, found others; make the bundle again") from None
        target = Target(**about["target"])
        yield Opened(target, about["limits"], folder / "engines" / "engines.json", folder / "graphs" / "assembly.json", manifest)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A new folder, removed at the end; when an interrupt hits the removal itself, then at the end of the process."""
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


def _about(archive: Archive) -> Mapping[str, Any]:
    about = archive.manifest
    fields = {"target": {"model", "precision", "layers", "backend"}, "limits": {"max_batch_size", "max_seq_len", "max_num_tokens", "max_input_len"}}
    fits = all(isinstance(about.get(name), dict) and set(about[name]) == keys for name, keys in fields.items()) and about.get("weights") in ("inside", "apart")
    missing = [name for name in _NEEDED if name not in archive.members]
    if not fits or missing:
        found = f"no {missing[0]}" if missing else "another manifest"
        raise InputError(f"{archive.path}: {MANIFEST}: expected target, limits, weights and {', '.join(_NEEDED)}, found {found}; make the bundle again")
    return about


def _weights_of(about: Mapping[str, Any]) -> str:
    return f"the weights of {about['target']['model']} in {about['target']['precision']}"


def _extract(archive: Archive, folder: Path) -> str:
    """Check every byte of the archive and write all but the weights to `folder`; gives the archive's hex sha256."""
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


def _check_named(archive: Archive, folder: Path) -> None:
    """Engines and tokenizer are files of the bundle and no others."""
    tokenizer = read_json(folder / "graphs" / "assembly.json", formats.ASSEMBLY).get("tokenizer") or {}
    names = [f"engines/{entry['file']}" for entry in read_json(folder / "engines" / "engines.json", formats.ENGINES)["engines"].values()]
    for name in [*names, *([f"graphs/{tokenizer['file']}"] if tokenizer else [])]:
        if name not in archive.members:
            raise InputError(f"{archive.path}: expected {name}, which a manifest in it names, found none; make the bundle again")


def _point_into(archive: Archive, manifest_path: Path, digest: str) -> None:
    """Rewrite the weights' manifest: its one file is the archive."""
    manifest = read_json(manifest_path, formats.WEIGHTS)
    members = []
    for file in manifest["files"]:
        member = archive.members.get(f"weights/{file['path']}")
        if member is None or (member.size, member.sha256) != (file["size"], file["sha256"]):
            raise InputError(f"{archive.path}: expected weights/{file['path']} of sha256 {file['sha256']}, found none; make the bundle again")
        members.append(member)
    tensors = {}
    for name, entry in manifest["tensors"].items():
        inside = 0 <= entry["file"] < len(members) and 0 <= entry["offset"] <= entry["offset"] + entry["length"] <= members[entry["file"]].size
        if not inside:
            raise InputError(f"{archive.path}: weights/weights.json: expected tensor {name!r} within its file, found {entry}; make the bundle again")
        tensors[name] = {**entry, "file": 0, "offset": entry["offset"] + members[entry["file"]].offset}
    remember(archive.path, digest)  # just hashed: whoever opens the weights need not do it again
    file = {"path": os.path.abspath(archive.path), "size": archive.size, "sha256": digest}
    write_json(manifest_path, {**manifest, "files": [file], "tensors": tensors})


def _bind(manifest_path: Path, weights: Path) -> Path:
    """The manifest of weights that lie elsewhere: `weights` itself, or that of the bundle, pointed to the folder `weights`."""
    if weights.is_file():
        return weights
    manifest = read_json(manifest_path, formats.WEIGHTS)
    for file in named_files(manifest_path):
        if not (weights / file.path.name).is_file():
            found = "no such file" if weights.is_dir() else "no such folder"
            remedy = "give the folder of the weights, or a weights.json"
            raise InputError(f"{weights}: expected {file.path.name} of {file.size} bytes, found {found}; {remedy}")
    files = [{**file, "path": os.path.abspath(weights / Path(file["path"]).name)} for file in manifest["files"]]
    write_json(manifest_path, {**manifest, "files": files})
    return manifest_path
