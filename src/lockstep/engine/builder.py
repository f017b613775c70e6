"""The build stage: an assembly in, an engine set out. Every class and kind once; what still fits is kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from lockstep import formats
from lockstep.engine.backend import Backend, get_backend
from lockstep.engine.prepare import prepare
from lockstep.errors import CheckError, InputError
from lockstep.files import read_json, sha256_file, write_json


def build(assembly_json: str | os.PathLike, backend: str, out_engines_json: str | os.PathLike, options: Mapping[str, Any] | None = None) -> Path:
    """Build the engine set of an assembly and write its engines.json; gives its path.

    An engine already there is kept when graph, options, device, backend version and builder revision are those recorded and its file is whole.
    Raises InputError for a precision that the backend lacks, CheckError for a graph that is damaged or that the library refuses.
    """
    assembly_path, out = Path(assembly_json), Path(out_engines_json)
    assembly, library = read_json(assembly_path, formats.ASSEMBLY), get_backend(backend)
    unknown = sorted(set(options or {}) - set(library.default_options()))
    if unknown:
        raise InputError(f"options of backend {backend}: expected only {', '.join(library.default_options())}, found {', '.join(unknown)}")
    if assembly["precision"] not in library.precisions:
        raise InputError(f"{assembly_path}: precision: expected one of {', '.join(library.precisions)} (backend {backend}), found {assembly['precision']!r}")
    manifest = {
        "format": formats.ENGINES,
        "backend": backend,
        "precision": assembly["precision"],
        "backend_version": library.version(),
        "builder_revision": library.revision,
        "device": library.describe_device(),
        "options": {**library.default_options(), **(options or {})},
        "engines": {},
    }
    recorded = _reusable(out, manifest, library)
    for name, graph in graphs_of(assembly):
        graph_path = assembly_path.parent / graph["graph"]
        if not graph_path.is_file():
            raise InputError(f"{graph_path}: expected a graph, found no file; export again")
        if sha256_file(graph_path) != graph["sha256"]:
            raise CheckError(f"{graph_path}: expected sha256 {graph['sha256']}, found {sha256_file(graph_path)}; export again")
        entry = recorded.get(name)
        if entry is None or entry["graph_sha256"] != graph["sha256"]:
            entry = {**_build_one(graph_path, graph, out.parent / f"{name}{library.suffix}", library, manifest["options"]), "graph_sha256": graph["sha256"]}
        manifest["engines"][name] = entry
    write_json(out, manifest)
    _delete_leftovers(out, {entry["file"] for entry in manifest["engines"].values()}, library.suffix)
    return out


def _build_one(graph_path: Path, graph: Mapping[str, Any], file: Path, library: Backend, options: Mapping[str, Any]) -> dict[str, Any]:
    """Build one engine. Where the backend asked for another form of the graph, the entry says which slots it has and of what."""
    prepared = prepare(onnx.load(graph_path), graph.get("slots", ()), options)
    if prepared is None:
        library.build(graph_path, file, options)
        return {"file": file.name, "sha256": sha256_file(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.", suffix=".tmp") as folder:
        rewritten = Path(folder) / "prepared.onnx"
        rewritten.write_bytes(prepared.model.SerializeToString(deterministic=True))
        library.build(rewritten, file, options)
    return {"file": file.name, "sha256": sha256_file(file), "slots": prepared.slots, "parts": prepared.parts}


def graphs_of(assembly: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(engine name, graph entry) of all that an assembly needs: classes by name, kinds as `<kind>.prefill` and `<kind>.decode`."""
    for name in sorted(assembly["classes"]):
        yield name, assembly["classes"][name]
    for name in sorted(assembly["kinds"]):
        for phase in ("decode", "prefill"):
            yield f"{name}.{phase}", assembly["kinds"][name][phase]


def _reusable(out: Path, manifest: Mapping[str, Any], library: Backend) -> dict[str, Any]:
    """Entries of the engine set at `out` whose files are whole, when it was made in the same way; else none."""
    if not out.exists():
        return {}
    try:
        old = read_json(out, formats.ENGINES)
    except InputError:
        return {}  # another format or half a file of an older version: it is built again
    keys = ("backend", "precision", "backend_version", "builder_revision", "options")
    if any(old.get(key) != manifest[key] for key in keys) or library.device_key(old.get("device", {})) != library.device_key(manifest["device"]):
        return {}
    whole = lambda entry: (out.parent / entry["file"]).is_file() and sha256_file(out.parent / entry["file"]) == entry["sha256"]
    return {name: entry for name, entry in old["engines"].items() if whole(entry)}


def _delete_leftovers(out: Path, kept: set[str], suffix: str) -> None:
    """Engines of earlier assemblies, and temporary files of builds that were killed."""
    for path in sorted(out.parent.iterdir()):
        if path.is_dir() and path.name.startswith(".") and path.name.endswith(".tmp"):
            shutil.rmtree(path)
        elif path.is_file() and path.name not in kept and (path.suffix == suffix or path.name.endswith(".tmp")):
            path.unlink()
