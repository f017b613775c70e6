"""Download large files of a repository into the hub's cache.

Interrupted in any way, the next run goes on where this one stopped.

`huggingface_hub` deletes an unfinished file when its process ends (2.x), so the bytes of weights are kept here until
the file is whole; everything else, the cache's layout above all, is the library's. Plain HTTP for the same reason: its
Xet client starts an unfinished file again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TextIO

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers
from tqdm import tqdm

from lockstep.errors import InputError

THREADS = 4  # files at a time: what it takes to fill a line whose servers limit each connection
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Interrupted(Exception):
    """Raised in a download when the main thread wants to end."""


def cache_folder(repository: str) -> Path:
    """Return the folder of the hub's cache that holds `repository`."""
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))


def download(repository: str, commit: str, names: Sequence[str], terminal: TextIO | None = None) -> None:
    """Bring files of `repository` at `commit` into the hub's cache.

    names: of the files. terminal: where a progress bar is shown, if it is a terminal.

    Raises InputError when a file's bytes are not those the hub announces, and the errors of huggingface_hub and its
    HTTP library.
    """
    snapshot = cache_folder(repository) / "snapshots" / commit
    missing = [name for name in names if not (snapshot / name).is_file()]
    stop = threading.Event()
    with (
        tqdm(desc=repository, unit="B", unit_scale=True, file=terminal, disable=None, total=0) as bar,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        futures = [pool.submit(_download, repository, commit, name, bar, stop) for name in missing]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _download(repository: str, commit: str, name: str, bar: tqdm, stop: threading.Event) -> None:
    url = hf_hub_url(repository, name, revision=commit)
    metadata = get_hf_file_metadata(url)
    if metadata.etag and metadata.size and metadata.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        blob = cache_folder(repository) / "blobs" / metadata.etag
        if not blob.exists():
            _download_blob(url, blob, metadata.size, _shared(bar, stop))
    # Finds the blob and links it; a file too large for plain HTTP it downloads itself.
    hf_hub_download(repository, name, revision=commit)


def _download_blob(url: str, blob: Path, size: int, progress: Any) -> None:
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.lockstep-part")
    with open(part, "a+b") as file:
        with contextlib.suppress(OSError):  # no locks on this file system: what two runs mix up, its sha256 shows
            fcntl.flock(file, fcntl.LOCK_EX)  # another run downloads the same file: wait for it
        if blob.exists():
            return
        done = file.seek(0, os.SEEK_END)
        if done > size:
            done = file.truncate(0)
        # Sizes of compressed bytes would be others.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        http_get(
            url,
            file,
            resume_size=done,
            headers=headers,
            expected_size=size,
            displayed_filename=blob.name,
            tqdm_class=progress,
        )
        file.flush()
        _check(file, blob, url)
        os.fsync(file.fileno())
        os.replace(part, blob)


def _check(file: Any, blob: Path, url: str) -> None:
    """Check a file of the hub's cache by its sha256, which is its name.

    Wrong bytes are thrown away: to go on from them would never end well. Raises InputError.
    """
    if _SHA256.fullmatch(blob.name):
        file.seek(0)
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != blob.name:
            file.truncate(0)
            raise InputError(
                f"{url}: expected bytes of sha256 {blob.name}, found {found}: damaged on the "
                f"way; run the same command again"
            )


def _shared(bar: tqdm, stop: threading.Event) -> type:
    """Return the class of a progress bar that `http_get` takes for its own.

    It adds to the one bar of all files, and ends when asked to.
    """

    class Progress:
        def __init__(self, *, total: int | None = None, initial: int = 0, **_: Any) -> None:
            with bar.get_lock():
                bar.total += total or 0
            bar.update(initial)

        def __enter__(self) -> Progress:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            if stop.is_set():
                raise _Interrupted
            bar.update(count)

    return Progress
