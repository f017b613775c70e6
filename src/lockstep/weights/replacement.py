"""Weights that a running server is given: a folder of safetensors files in, their weights manifest out.

Nobody has time to hash gigabytes between two steps: a file's digest in the manifest is that of its size, inode and
times, and is valid while these do not change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.places import StoredFile, TensorPlace
from lockstep.artifacts.weights import WeightsManifest
from lockstep.checkpoint.language import language_tensors
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.errors import InputError, truncate_list
from lockstep.manifests.digest_cache import stamp


def write_manifest(folder: Path, served: Path, out: Path) -> None:
    """Write the manifest `out` of the tensors in a folder, which must be as those of the weights manifest `served`.

    Raises InputError for files that are cut, and for tensors of other names, dtypes or shapes.
    """
    expected = WeightsManifest.load(served)
    stored: dict[str, TensorPlace] = {}
    files = []
    for path in sorted(folder.glob("*.safetensors")):
        digest = stamp(path)
        for name, place in read_header(path).items():
            if name in stored:
                raise InputError(f"{path}: expected each tensor in one file, found {name!r} in {stored[name].file} too")
            stored[name] = replace(place, file=str(path))
        files.append(StoredFile(str(path), path.stat().st_size, digest))
    if not files:
        raise InputError(f"{folder}: expected files *.safetensors, found none")
    places, _ = language_tensors(stored)
    missing = truncate_list(sorted(expected.tensors.keys() - places.keys()))
    extra = truncate_list(sorted(places.keys() - expected.tensors.keys()))
    if missing or extra:
        difference = f"no {missing}" if missing else f"also {extra}"
        raise InputError(f"{folder}: expected the {len(expected.tensors)} tensors that are served, found {difference}")
    for name, place in expected.tensors.items():
        actual = places[name]
        if (actual.dtype, actual.shape) != (place.dtype, place.shape):
            raise InputError(
                f"{actual.file}: tensor {name!r}: expected {place.dtype} {list(place.shape)}, as served, found "
                f"{actual.dtype} {list(actual.shape)}"
            )
    manifest = WeightsManifest.of(expected.precision, files, places, expected.group_size)
    replace(manifest, transposed=expected.transposed).save(out)
