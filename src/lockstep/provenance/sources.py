"""The user's files that stages read, and their changes since: digests decide, not dates."""

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


def changed_files(job: Job, sources: Sources) -> list[str]:
    """Return a line for each changed file of a job's inputs. Raises LockstepError for files that it cannot read."""
    files = STAGES[job.stage].rule.files.values()
    lines: list[str] = []
    if "sides" in files:
        lines += _changed_checkpoint(job, sources)
    if "path" in files:
        lines += _changed_source(job, sources)
    if "folders" in files:
        lines += _changed_adapters(job, sources)
    return lines


def _changed_checkpoint(job: Job, sources: Sources) -> Iterator[str]:
    if sources.folder is None:
        return
    manifest = CheckpointManifest.load(job.output)
    paths = side_files(sources.folder)
    if "weights" in STAGES[job.stage].rule.files.values():
        paths = [*paths, *weight_files(sources.folder, find_tensors(sources.folder))]
        if sources.fetched and sources.fetched.is_file():
            commit = Fetched.load(sources.fetched).commit
            if commit != manifest.commit:
                yield f"{sources.fetched}: commit {words(manifest.commit)} -> {words(commit)}"
    recorded = {file.path: file.sha256 for file in manifest.files}
    yield from _differences(sources.folder, recorded, {path.name: path for path in paths})


def _changed_source(job: Job, sources: Sources) -> Iterator[str]:
    place = sources.made_of
    if place is None:
        return
    gguf_sha256 = Fetched.load(job.output).gguf
    if gguf_sha256:
        yield from _differences(place.parent, {place.name: gguf_sha256}, {place.name: place})
        return
    checkpoint = folder_of(job.output)
    tokenizer = place.with_name("tokenizer.json")
    # Compared as JSON: the copy is written in canonical form.
    if _json(place) != _json(checkpoint / "config.json"):
        yield f"{place} changed"
    if tokenizer.is_file():
        copy = checkpoint / tokenizer.name
        recorded = {copy.name: digest(copy)} if copy.is_file() else {}
        yield from _differences(tokenizer.parent, recorded, {tokenizer.name: tokenizer})


def _changed_adapters(job: Job, sources: Sources) -> Iterator[str]:
    for name, adapter in AdaptersManifest.load(job.output).adapters.items():
        if folder := sources.adapters.get(name):
            recorded = {file.path: file.sha256 for file in adapter.files}
            present = {path: folder / path for path in recorded if (folder / path).is_file()}
            yield from _differences(folder, recorded, present)


def _differences(folder: Path, recorded: Mapping[str, str], present: Mapping[str, Path]) -> Iterator[str]:
    """Yield a line for each file of a folder that differs. recorded: {name: sha256}. present: {name: path}."""
    for name in sorted(recorded.keys() - present.keys()):
        yield f"{folder / name} is gone"
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
