"""Fetch a model from the hub.

In: `hf:org/name@revision`. Out: `source.json`, and next to it the folder `checkpoint/` of links into the hub's cache.

A branch or tag is resolved to a commit once. The manifest records that commit, which is used from then on.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from lockstep.artifacts.fetched import folder_of, load_if_same_source, write_fetched
from lockstep.artifacts.files import read_json, sha256_file
from lockstep.checkpoint.fetched_files import link
from lockstep.checkpoint.resolve import SIDE_FILES
from lockstep.checkpoint.tensors import INDEX, SINGLE, indexed_shards
from lockstep.config.sources import HubSource, parse_source
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import lost_files

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt)")
_AGAIN = "run the same command again"


def fetch(
    source: str, out: Path, check: Callable[[Path, str], None] = lambda folder, commit: None, commit: str | None = None
) -> Path:
    """Fetch the hub model `source` and write its manifest `out`, which is returned; links go to `checkpoint/` there.

    The commit is `commit`, else that of an earlier `out` or `checkpoint.json` of this source. `check`
    is called with a folder that holds the model's config.json and with the commit, before any weights are downloaded.

    Raises InputError for a repository that is absent, closed or has no safetensors, and when the hub cannot be reached
    and the cache lacks a file.
    """
    hub = parse_source(source)
    out = Path(out)
    assert isinstance(hub, HubSource)  # resolve fetches no other
    earlier = load_if_same_source(out, source)
    if earlier and earlier.commit and earlier.commit == (commit or earlier.commit) and not lost_files(out):
        check(folder_of(out), earlier.commit)
        os.utime(out)  # Snakemake considers a job done by the time of its output
        return out
    disable_progress_bars()  # of small files
    pinned = commit or _pinned(out, source)
    with one_line(source, hub, pinned):
        commit = pinned or HfApi().resolve_revision(hub.repository, revision=hub.revision).resolved
        snapshot = cache_folder(hub.repository) / "snapshots" / commit
        names = _repository_files(source, hub, commit, snapshot)
        sides = _side_files(source, hub, names)
        for name in sides:
            hf_hub_download(hub.repository, name, revision=commit)
        check(snapshot, commit)
        weights = [SINGLE]
        if SINGLE not in names:
            weights = indexed_shards(snapshot / INDEX)
        for name in weights:
            if name not in names:
                raise InputError(
                    f"{source}: expected {name}, which {INDEX} names, found no such file in the "
                    f"repository; use another revision"
                )
        enable_progress_bars()
        for name in weights:
            if not (snapshot / name).is_file():
                _check_digest(Path(hf_hub_download(hub.repository, name, revision=commit)), source)
    files = sorted([*sides, *weights])
    link(folder_of(out), {name: snapshot / name for name in files})
    return write_fetched(
        out,
        source,
        {name: _sha256(snapshot / name) for name in files},
        repository=hub.repository,
        revision=hub.revision,
        commit=commit,
    )


def fetch_config(source: str) -> Path:
    """Fetch the config.json of the hub model `source` into the hub's cache; return its path.

    Raises InputError as `fetch` does.
    """
    hub = parse_source(source)
    assert isinstance(hub, HubSource)
    with one_line(source, hub, None):
        commit = HfApi().resolve_revision(hub.repository, revision=hub.revision).resolved
        return Path(hf_hub_download(hub.repository, "config.json", revision=commit))


def cache_folder(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))


def _check_digest(path: Path, source: str) -> None:
    """Check a downloaded large file by its sha256, its name in the cache; delete it if it has other bytes."""
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name):  # a small file, named by git's digest; the hub's library checks its size
        return
    sha256 = sha256_file(blob)
    if sha256 != blob.name:
        blob.unlink()
        path.unlink(missing_ok=True)
        raise InputError(
            f"{source}: expected bytes of sha256 {blob.name}, found {sha256}: damaged on the way; {_AGAIN}"
        )


def _pinned(out: Path, source: str) -> str | None:
    """Return the commit of an earlier run for the same source."""
    earlier = load_if_same_source(out, source)
    if earlier:
        return earlier.commit
    checkpoint = out.with_name("checkpoint.json")
    if checkpoint.is_file():
        manifest = read_json(checkpoint)
        if manifest.get("source") == source:
            return manifest.get("commit")
    return None


def _repository_files(source: str, hub: HubSource, commit: str, snapshot: Path) -> Collection[str]:
    """Return the files of the repository at `commit`, or those in the cache where the hub cannot be reached."""
    try:
        info = HfApi().model_info(hub.repository, revision=commit)
    except (HTTPError, OfflineModeIsEnabled) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        # A link without its file remains after the cache was cleaned.
        cached = {path.name for path in snapshot.glob("*") if path.is_file()}
        weights = [SINGLE]
        if INDEX in cached and SINGLE not in cached:
            weights = indexed_shards(snapshot / INDEX)
        lacking = [name for name in ("config.json", "tokenizer.json", *weights) if name not in cached]
        if lacking:
            raise InputError(
                f"{source}: expected the hub or commit {commit[:12]} in its cache, found {_reason(error)} and no "
                f"{lacking[0]} in {snapshot}; run again with a network"
            ) from None
        return cached
    return {file.rfilename for file in info.siblings or ()}


def _side_files(source: str, hub: HubSource, names: Collection[str]) -> list[str]:
    """Return the files to fetch other than weights: with the index of shards and the model card, for its licence."""
    if "adapter_config.json" in names and "config.json" not in names:
        raise InputError(
            f"{source}: expected a model, found an adapter (adapter_config.json); merge it into "
            f"its base model and give that folder"
        )
    if "config.json" not in names:
        raise InputError(
            f"{source}: expected config.json, found none in the repository; use a model in the format of transformers"
        )
    if SINGLE not in names and INDEX not in names:
        pickled = sorted(name for name in names if _PICKLED.fullmatch(name))
        actual = "no weights"
        remedy = "use another repository or revision"
        if pickled:
            actual = f"pickled weights ({pickled[0]}), which can run code when they are opened"
            convert = _convert_locally(
                hub,
                "save it as safetensors: transformers.AutoModelForCausalLM.from_pretrained(FOLDER, "
                "dtype='auto').save_pretrained(FOLDER)",
            )
            remedy = f"use a revision with safetensors (many have one as refs/pr/N), or {convert}"
        raise InputError(f"{source}: expected {SINGLE} or {INDEX}, found {actual}; {remedy}")
    if "tokenizer.json" not in names:
        convert = _convert_locally(hub, "make the file: python -m lockstep.export.slow_tokenizer FOLDER")
        raise InputError(f"{source}: expected tokenizer.json, found none in the repository; {convert}")
    side_files = [*SIDE_FILES, "README.md"]
    if SINGLE not in names:
        side_files.append(INDEX)
    return [name for name in side_files if name in names]


def _convert_locally(hub: HubSource, step: str) -> str:
    return f"download it with `hf download {hub.repository} --local-dir FOLDER`, {step}, and give FOLDER as the source"


def _sha256(path: Path) -> str:
    """Return a file's sha256; a large file has it as its name in the cache, checked after the download."""
    name = path.resolve().name
    if _SHA256.fullmatch(name):
        return name
    return sha256_file(path)


@contextlib.contextmanager
def one_line(source: str, hub: HubSource, pinned: str | None) -> Iterator[None]:
    """Turn each of the hub's errors into one line that says what to do.

    pinned: the requested commit, where it is not the source's revision.
    """
    login = "use a token that may read it" if get_token() else "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except GatedRepoError:
        raise InputError(
            f"{source}: expected access to this gated model, found none; ask for it on "
            f"{constants.ENDPOINT}/{hub.repository}, then {login}"
        ) from None
    except RevisionNotFoundError:
        if pinned and pinned != hub.revision:
            raise InputError(
                f"{source}: expected commit {pinned}, at which it was found before, found it gone from "
                f"{hub.repository}; "
                "take the newest one: delete source.json and checkpoint.json of the model, and run again, not locked"
            ) from None
        raise InputError(
            f"{source}: expected a branch, tag or commit, found no revision {hub.revision!r} in "
            f"{hub.repository}; correct it"
        ) from None
    except (RevisionResolutionError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise InputError(
            f"{source}: expected the hub or its cache, found {_reason(error)} and no such model "
            f"in the cache; run again with a network"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        # The hub answers 401, not 404, to users without the right to know whether a model exists.
        if isinstance(error, RepositoryNotFoundError) or status == 401:
            raise InputError(
                f"{source}: expected a model on {constants.ENDPOINT}, found none of this name "
                f"({status}); correct it, or if it is private {login}"
            ) from None
        remedy = "use another revision" if isinstance(error, EntryNotFoundError) else _AGAIN
        if status == 403:
            remedy = login
        raise InputError(
            f"{source}: expected an answer of {constants.ENDPOINT}, found status {status}; {remedy}"
        ) from None
    except HTTPError as error:
        raise InputError(
            f"{source}: expected the whole download, found it interrupted ({type(error).__name__}); {_AGAIN}"
        ) from None
    except OSError as error:
        # huggingface_hub raises it, without a number, when a file has another size than announced.
        if error.errno is not None:
            raise
        raise InputError(
            f"{source}: expected the files that the hub announces, found {' '.join(str(error).split())}; {_AGAIN}"
        ) from None


def _reason(error: BaseException) -> str:
    if constants.is_offline_mode() or isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE set"
    return f"{constants.ENDPOINT} out of reach"
