"""The files of a manifest: those that it names, those lost, and their content.

A manifest in; its files, those of them that are gone, and its content out. Snakemake looks at the manifest only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import read_json, sha256_json
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import Expected, digest, size_of

_NAMES = ("file", "graph", "path")  # keys of a file's name, next to its "sha256"
# {format: keys that are no content: paths and origins, and the CPU of the builder}.
_NO_CONTENT = {
    formats.CHECKPOINT: ("source", "folder", "commit"),
    formats.SOURCE: ("source", "commit"),
    formats.ADAPTER_SOURCES: ("adapters",),
    formats.ENGINES: ("device",),
}


def lost_files(manifest: str | os.PathLike) -> list[Path]:
    """Return the files of a manifest that are absent or of another size.

    Of an assembly, engines or weights, those named with a digest. A manifest that cannot be read is lost itself.
    Contents are not read: that is for whoever opens the files.
    """
    manifest = Path(manifest)
    try:
        files = {file.path: file for file in named_files(manifest)}
    except InputError:
        return [manifest]
    sizes = {path: size_of(path) for path in files}
    return sorted(path for path, file in files.items() if sizes[path] is None or file.size not in (None, sizes[path]))


def named_files(manifest: str | os.PathLike) -> list[Expected]:
    """Return the files that a manifest names with a digest, each once.

    Paths are relative to the manifest, but for those of a checkpoint (relative to the folder that it names) and of an
    adapter (to the adapter's folder). Raises InputError for a manifest that cannot be read.
    """
    manifest = Path(manifest)
    value = read_json(manifest)
    kind = value.get("format") if isinstance(value, dict) else None
    with manifest_entries(manifest):
        folder = manifest.parent
        if kind == formats.CHECKPOINT:
            folder = folder / value["folder"]
        files: dict[str, Expected] = {}
        if kind == formats.ADAPTERS:
            for adapter in value["adapters"].values():
                for name, sha256, size in _named(adapter["files"]):
                    path = str(Path(adapter["folder"]) / name)
                    files[path] = Expected(folder / path, sha256, size)
        else:
            for name, sha256, size in _named(value):
                files[name] = Expected(folder / name, sha256, size)
        return [files[name] for name in sorted(files)]


@contextlib.contextmanager
def manifest_entries(manifest: Path) -> Iterator[None]:
    """Raise InputError, naming the manifest, where the body, which checks none, meets an absent or mistyped entry."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = "entries of another type"
        if isinstance(error, KeyError):
            reason = f"no {error}"
        raise InputError(
            f"{manifest}: expected a manifest of this version, found {reason}; delete it and run again"
        ) from None


def _named(value: Any) -> Iterator[tuple[str, str, int | None]]:
    """Yield (name, sha256, size or None) of each object with a sha256 and a file name."""
    if isinstance(value, dict):
        sha256 = value.get("sha256")
        if isinstance(sha256, str):
            for key in _NAMES:
                if isinstance(value.get(key), str):
                    yield value[key], sha256, value.get("size")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _named(item)


def failed_path(out: str | os.PathLike) -> Path:
    """Return the path of a failed check's report: `2.failed.json` for `2.json`."""
    out = Path(out)
    return out.with_name(f"{out.stem}.failed{out.suffix}")


def content(path: Path) -> str:
    """Return the hex sha256 of a manifest's content, which paths are no part of, or of another file's bytes."""
    if path.suffix != ".json":
        return digest(path)
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") is None:
        return digest(path)
    kind = value["format"]
    value = _without(value, _NO_CONTENT.get(kind, ()))
    with manifest_entries(path):
        if kind == formats.ADAPTERS:
            value["adapters"] = {
                name: _without(adapter, ("source", "folder", "commit")) for name, adapter in value["adapters"].items()
            }
        if kind == formats.WEIGHTS:
            value["files"] = [{**file, "path": Path(file["path"]).name} for file in value["files"]]
        return sha256_json(value)


def _without(value: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}
