"""The user's files that stages read, and what has changed in them since.

A step and the places of its model's files in; the files, or what has changed in them, out. Dates decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.fetched import Fetched, folder_of
from lockstep.artifacts.files import read_json
from lockstep.checkpoint.packed import packed_weights, quantized_tensors
from lockstep.checkpoint.resolve import side_files, weight_files
from lockstep.checkpoint.tensors import find_tensors
from lockstep.config.packing import packing_of
from lockstep.config.sources import FolderSource, GgufSource, RandomSource, parse_source
from lockstep.manifests.digest_cache import digest, size_of
from lockstep.provenance.diff import words
from lockstep.stages import Job
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class Sources:
    """The places of a model's files.

    folder: of its checkpoint; None where it is not there yet. fetched: the manifest of a job that brings it. random:
    the config.json of random weights. gguf: the GGUF file. adapters: folders by name.
    """

    folder: Path | None = None
    fetched: Path | None = None
    random: Path | None = None
    gguf: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: Config, model: str, results: Results, place: Path | None, adapters: Mapping[str, Path]
    ) -> Sources:
        """Return the places of a model of the config. place: what `Config.check_sources` gives for it."""
        kind = parse_source(config.models[model].source)
        if isinstance(kind, FolderSource):
            return cls(place, adapters=adapters)
        fetched = results.source(model)
        folder = folder_of(fetched)
        random = place if isinstance(kind, RandomSource) else None
        gguf = place if isinstance(kind, GgufSource) else None
        return cls(folder if folder.is_dir() else None, fetched, random, gguf, adapters)


def changed_files(step: Job, sources: Sources) -> list[str]:
    """Return what has changed in the files that a step made its output of.

    A line each. Raises LockstepError for files that cannot be what the step reads.
    """
    changed = {
        "resolve": _changed_checkpoint,
        "architecture": _changed_checkpoint,
        "make_checkpoint": _changed_source,
        "adapters": _changed_adapters,
    }.get(step.stage)
    return list(changed(step, sources)) if changed else []


def _changed_checkpoint(step: Job, sources: Sources) -> Iterator[str]:
    if sources.folder is None:
        return
    manifest, folder = CheckpointManifest.load(step.output), sources.folder
    found = find_tensors(folder) if step.stage == "resolve" or manifest.quantization else None
    weights = weight_files(folder, found) if found and step.stage == "resolve" else []
    recorded = {file.path: file.sha256 for file in manifest.files}
    yield from _differences(folder, recorded, {path.name: path for path in [*side_files(folder), *weights]})
    # Of an architecture the headers of quantised weights decide, and no digest of these is in it.
    if found and manifest.quantization and step.stage == "architecture":
        packing = packing_of(manifest.config)
        assert packing is not None  # of what else is quantised
        now = quantized_tensors(packing, packed_weights(packing, found.tensors, folder), folder)
        if now != manifest.quantization:
            yield f"{folder}: other tensors are quantised"
    if step.stage == "resolve" and sources.fetched and sources.fetched.is_file():
        commit = Fetched.load(sources.fetched).commit
        if commit != manifest.commit:
            yield f"{sources.fetched}: commit {words(manifest.commit)} -> {words(commit)}"


def _changed_source(step: Job, sources: Sources) -> Iterator[str]:
    if sources.gguf is not None and digest(sources.gguf) != Fetched.load(step.output).gguf:
        yield f"{sources.gguf} changed"
    if sources.random is None:
        return
    made, tokenizer = folder_of(step.output), sources.random.with_name("tokenizer.json")
    if _json(sources.random) != _json(made / "config.json"):
        yield f"{sources.random} changed"
    if tokenizer.is_file() and _digest(tokenizer) != _digest(made / "tokenizer.json"):
        yield f"{tokenizer} changed"


def _changed_adapters(step: Job, sources: Sources) -> Iterator[str]:
    for name, adapter in AdaptersManifest.load(step.output).adapters.items():
        if name in sources.adapters:
            folder = sources.adapters[name]
            there = {file.path: folder / file.path for file in adapter.files if (folder / file.path).is_file()}
            yield from _differences(folder, {file.path: file.sha256 for file in adapter.files}, there)


def _differences(folder: Path, recorded: Mapping[str, str], there: Mapping[str, Path]) -> Iterator[str]:
    yield from (f"{folder / name} is gone" for name in sorted(recorded.keys() - there.keys()))
    yield from (f"{path} is new" for name, path in sorted(there.items()) if name not in recorded)
    for name, path in sorted(there.items()):
        if name in recorded and (found := digest(path)) != recorded[name]:
            yield f"{path} changed: sha256 {words(recorded[name])} -> {words(found)}"


def _json(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def _digest(path: Path) -> str | None:
    return None if size_of(path) is None else digest(path)
