"""Fetch adapters from the hub.

In: `hf:org/name@revision` of each. Out: `adapter_sources.json`, and next to it a folder of links into the hub's cache
for each adapter.

As for models, a branch or tag is resolved to a commit once, and that commit is used from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import disable_progress_bars

from lockstep.artifacts.adapters import CONFIG, WEIGHTS, AdapterSource, AdapterSources, fetched_manifest
from lockstep.artifacts.fetched import FOLDER, folder_of, load_if_same_source, write_fetched
from lockstep.artifacts.files import remove_leftovers, sha256_file
from lockstep.artifacts.places import StoredFile
from lockstep.checkpoint.fetched_files import link
from lockstep.checkpoint.hub.fetch import cache_folder, one_line
from lockstep.config.sources import HubSource, parse_source
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import lost_files


def fetch_adapters(sources: Mapping[str, str], out: Path) -> Path:
    """Fetch adapters and write their manifest `out`, which is returned.

    sources: {adapter: source}. Each gets a folder below `adapter_sources/`.

    Raises InputError for a repository that is absent, closed or has no adapter in safetensors, and when the hub cannot
    be reached and the cache lacks a file.
    """
    out = Path(out)
    disable_progress_bars()
    entries = {}
    files = []
    for name, source in sorted(sources.items()):
        manifest = fetched_manifest(out, name)
        manifest.parent.mkdir(parents=True, exist_ok=True)
        commit = _fetch(source, manifest)
        entries[name] = AdapterSource(source, commit)
        for file in (CONFIG, WEIGHTS):
            path = folder_of(manifest) / file
            place = f"{manifest.parent.relative_to(out.parent).as_posix()}/{FOLDER}/{file}"
            files.append(StoredFile(place, path.stat().st_size, sha256_file(path)))
    remove_leftovers(out)
    AdapterSources(entries, tuple(files)).save(out)
    return out


def _fetch(source: str, manifest: Path) -> str:
    """Fetch an adapter's files and write its manifest; return their commit."""
    hub = parse_source(source)
    assert isinstance(hub, HubSource)  # the stage fetches no other
    pinned = None
    if earlier := load_if_same_source(manifest, source):
        pinned = earlier.commit
    if pinned and not lost_files(manifest):  # nothing is asked of the hub
        return pinned
    with one_line(source, hub, pinned):
        commit = pinned or HfApi().resolve_revision(hub.repository, revision=hub.revision).resolved
        with _missing_file_explained(source, commit, hub.repository):
            for file in (CONFIG, WEIGHTS):
                hf_hub_download(hub.repository, file, revision=commit)
    snapshot = cache_folder(hub.repository) / "snapshots" / commit
    link(folder_of(manifest), {file: snapshot / file for file in (CONFIG, WEIGHTS)})
    digests = {file: sha256_file(snapshot / file) for file in (CONFIG, WEIGHTS)}
    write_fetched(manifest, source, digests, repository=hub.repository, revision=hub.revision, commit=commit)
    return commit


@contextlib.contextmanager
def _missing_file_explained(source: str, commit: str, repository: str) -> Iterator[None]:
    """Turn the error for a missing file into an InputError that says what the repository has instead."""
    try:
        yield
    except LocalEntryNotFoundError:  # the hub cannot be reached, which `one_line` reports
        raise
    except EntryNotFoundError as error:
        names = set()
        with contextlib.suppress(HTTPError, HfHubHTTPError, OfflineModeIsEnabled):
            names = {file.rfilename for file in HfApi().model_info(repository, revision=commit).siblings or ()}
        lacking = CONFIG
        actual = "none in the repository"
        if CONFIG in names:
            lacking = WEIGHTS
            for pickled in sorted(name for name in names if name.startswith("adapter_model.") and name != WEIGHTS)[:1]:
                actual = f"pickled weights ({pickled})"
        raise InputError(
            f"{source}: expected an adapter as PEFT saves it with {lacking}, found {actual}; use a revision that has "
            "it, or save it as safetensors and give its folder"
        ) from error
