"""Pack a finished target into one file: engines, assembly, tokenizer, manifests, statements and, if asked, weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.statement import statement_path
from lockstep.artifacts.weights import WeightsManifest
from lockstep.bundle.archive import About, BundledLimits, BundledTarget, Entry, write_archive
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import digest
from lockstep.provenance.statements import stated
from lockstep.targets import Limits, Results, Target


def pack(results: Results, target: Target, limits: Limits, out: Path, with_weights: bool = False) -> Path:
    """Write the bundle of `target` to `out`, and return `out`. The same results give the same bytes.

    limits: those that it runs with. Raises InputError for files that are missing or have changed.
    """
    entries = [*_engines(results, target), *_graphs(results, target), *_weights(results, target, with_weights)]
    if Assembly.load(results.assembly(target.model, target.precision)).adapters is not None:
        entries += adapter_entries(results.adapters(target.model))
    # The backend's own name: whoever opens the bundle does not have this config's names for devices.
    backend = EngineSetManifest.load(results.engines(target.model, target.precision, target.backend)).backend
    about = About(
        BundledTarget(**asdict(replace(target, backend=backend))),
        BundledLimits(**asdict(limits)),
        "inside" if with_weights else "apart",
    )
    return write_archive(Path(out), about, entries)


def _engines(results: Results, target: Target) -> Iterator[Entry]:
    manifest = results.engines(target.model, target.precision, target.backend)
    yield from _with_statement(manifest, "engines")
    for _, entry in sorted(EngineSetManifest.load(manifest).engines.items()):
        yield _file(f"engines/{entry.file}", manifest.parent / entry.file, entry.sha256)


def _graphs(results: Results, target: Target) -> Iterator[Entry]:
    """Yield the assembly, the tokenizer and the chat template. Graphs are not needed to run engines."""
    manifest = results.assembly(target.model, target.precision)
    yield from _with_statement(manifest, "graphs")
    assembly = Assembly.load(manifest)
    for entry in (assembly.tokenizer, assembly.chat_template):
        if entry is not None:
            yield _file(f"graphs/{entry.file}", manifest.parent / entry.file, entry.sha256)


def _weights(results: Results, target: Target, inside: bool) -> Iterator[Entry]:
    path = results.weights(target.model, target.precision)
    manifest = WeightsManifest.load(path)
    # In results the files may lie anywhere, as a checkpoint's; in a bundle they lie next to the manifest.
    yield Entry.of_bytes("weights/weights.json", manifest.moved(os.path.basename).to_bytes())
    if inside:
        for file in manifest.files:
            yield _file(f"weights/{os.path.basename(file.path)}", path.parent / file.path, file.sha256)


def adapter_entries(path: Path) -> Iterator[Entry]:
    """Yield the files of the model's adapters, each adapter in a numbered folder, and their manifest."""
    manifest = AdaptersManifest.load(path)
    moved = {}
    for number, (name, adapter) in enumerate(sorted(manifest.adapters.items())):
        # A bundle has no paths of the machine that made it, so a local adapter has its name as its source.
        source = adapter.source if adapter.commit else name
        moved[name] = replace(adapter, folder=str(number), source=source)
        for file in adapter.files:
            yield _file(f"adapters/{number}/{file.path}", manifest.folder_of(path, name) / file.path, file.sha256)
    yield Entry.of_bytes("adapters/adapters.json", AdaptersManifest(moved).to_bytes())


def _with_statement(manifest: Path, folder: str) -> Iterator[Entry]:
    yield _file(f"{folder}/{manifest.name}", manifest, stated(manifest).outputs[manifest.name])
    path = statement_path(manifest)
    yield _file(f"{folder}/{path.name}", path, digest(path))


def _file(name: str, path: Path, sha256: str) -> Entry:
    if not path.is_file():
        raise InputError(f"{path}: expected a file of sha256 {sha256}, found none; run `lockstep run` first")
    return Entry.of_file(name, path, sha256)
