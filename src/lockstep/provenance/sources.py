"""The user's files that stages read, and their changes since.

A step and the places of its model's files in; the files, or their changes, out. Digests decide, not dates.
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
from lockstep.checkpoint.resolve import side_files, weight_files
from lockstep.checkpoint.tensors import find_tensors
from lockstep.config.sources import FolderSource, parse_source
from lockstep.manifests.digest_cache import digest
from lockstep.provenance.lock import words
from lockstep.stages import STAGES, Job
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class Sources:
    """The places of a model's files.

    folder: of its checkpoint; None where it is not there yet. fetched: the manifest of the job that fetches it.
    made_of: the GGUF file, or the config.json of random weights. adapters: {name: folder}.
    """

    folder: Path | None = None
    fetched: Path | None = None
    made_of: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: Config, model: str, results: Results, place: Path | None, adapters: Mapping[str, Path]
    ) -> Sources:
        """Return the places of a model of the config. place: of `Config.check_sources`."""
        if isinstance(parse_source(config.models[model].source), FolderSource):
            return cls(place, adapters=adapters)
        fetched = results.source(model)
        folder = folder_of(fetched)
        return cls(folder if folder.is_dir() else None, fetched, place, adapters)


def changed_files(step: Job, sources: Sources) -> list[str]:
    """Return a line for each changed file of a step's inputs. Raises LockstepError for files that it cannot read."""
    read = STAGES[step.stage].rule.files.values()
    changed = {"sides": _changed_checkpoint, "path": _changed_source, "folders": _changed_adapters}
    lines: list[str] = []
    for files, changes in changed.items():
        if files in read:
            lines += changes(step, sources)
    return lines


def _changed_checkpoint(step: Job, sources: Sources) -> Iterator[str]:
    if sources.folder is None:
        return
    manifest = CheckpointManifest.load(step.output)
    paths = side_files(sources.folder)
    if "weights" in STAGES[step.stage].rule.files.values():
        paths = [*paths, *weight_files(sources.folder, find_tensors(sources.folder))]
        if sources.fetched and sources.fetched.is_file():
            commit = Fetched.load(sources.fetched).commit
            if commit != manifest.commit:
                yield f"{sources.fetched}: commit {words(manifest.commit)} -> {words(commit)}"
    recorded = {file.path: file.sha256 for file in manifest.files}
    yield from _differences(sources.folder, recorded, {path.name: path for path in paths})


def _changed_source(step: Job, sources: Sources) -> Iterator[str]:
    if (place := sources.made_of) is None:
        return
    if gguf := Fetched.load(step.output).gguf:
        yield from _differences(place.parent, {place.name: gguf}, {place.name: place})
        return
    checkpoint = folder_of(step.output)
    tokenizer = place.with_name("tokenizer.json")
    if _json(place) != _json(checkpoint / "config.json"):  # as JSON: the copy is written in canonical form
        yield f"{place} changed"
    if tokenizer.is_file():
        written = checkpoint / tokenizer.name
        recorded = {path.name: digest(path) for path in (written,) if path.is_file()}
        yield from _differences(tokenizer.parent, recorded, {tokenizer.name: tokenizer})


def _changed_adapters(step: Job, sources: Sources) -> Iterator[str]:
    for name, adapter in AdaptersManifest.load(step.output).adapters.items():
        if folder := sources.adapters.get(name):
            recorded = {file.path: file.sha256 for file in adapter.files}
            present = {name: folder / name for name in recorded if (folder / name).is_file()}
            yield from _differences(folder, recorded, present)


def _differences(folder: Path, recorded: Mapping[str, str], present: Mapping[str, Path]) -> Iterator[str]:
    yield from (f"{folder / name} is gone" for name in sorted(recorded.keys() - present.keys()))
    for name, path in sorted(present.items()):
        if name not in recorded:
            yield f"{path} is new"
            continue
        sha256 = digest(path)
        if sha256 != recorded[name]:
            yield f"{path} changed: sha256 {words(recorded[name])} -> {words(sha256)}"


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    return read_json(path)
