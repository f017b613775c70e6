"""The cache of artefacts, by build key, shared between checkouts and machines.

A job and its build key in: an artefact that was made once is copied, not built. Every use is a line on stderr, which is
the job's log. Where the cache cannot be read or written, or is damaged, the line says so and the artefact is made as
without a cache.

A cache is a folder: `entries/<build key>.json` is the statement of an artefact, whose subjects are `blobs/<sha256>`.
Files are written to a temporary name in the same folder, flushed and renamed, so that others see them whole or not at
all. Names of temporary files are random: process ids of two machines may be equal. Damaged files are never used, and
deleted where that is allowed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.artifacts.files import atomic_path, remove_leftovers, sha256_file
from lockstep.artifacts.statement import BuildKey, Statement, statement_path
from lockstep.errors import InputError, LockstepError
from lockstep.manifests.digest_cache import remember, size_of
from lockstep.manifests.manifest_files import content, named_files
from lockstep.manifests.own_files import clear_unnamed
from lockstep.provenance.code_identity import code_digests
from lockstep.provenance.statements import read_statement
from lockstep.stages import STAGES, Job

VARIABLE = "LOCKSTEP_CACHE"
REUSED = "reused: "  # begins the line of a job's log that a run shows
# Files that an earlier artefact may have left in the folder of graphs or engines.
_SUFFIXES = (".onnx", ".engine", ".zip")


def cache_folder(configured: str = "") -> Path | None:
    """Return the folder of the cache: LOCKSTEP_CACHE, also where it is empty, else the config's; None for none.

    The variable wins because the place of a cache depends on the machine, and a config is shared. Raises InputError
    where no folder can be.
    """
    where = VARIABLE if VARIABLE in os.environ else "config: cache"
    text = os.environ.get(VARIABLE, configured)
    if not text:
        return None
    folder = Path(os.path.expanduser(text))
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise InputError(
            f"{where}: expected a folder, or a path where one can be made, found that {existing} "
            f"is a file; name another place or move the file away"
        )
    return folder


class Cache:
    """A cache at `folder`, which is made when something is first put into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = folder / "entries"
        self.blobs = folder / "blobs"

    def entry_path(self, key: str) -> Path:
        return self.entries / f"{key}.json"

    def blob_path(self, sha256: str) -> Path:
        return self.blobs / sha256

    def read(self, key: str) -> Statement | None:
        """Return the entry of a build key, or None. Raises LockstepError for a damaged one or an absent blob."""
        path = self.entry_path(key)
        if not os.path.lexists(path):
            return None
        entry = Statement.load(path)
        if entry.key.sha256 != key:
            raise InputError(f"{path}: expected an entry of this build key, found that of another")
        for sha256 in entry.outputs.values():
            if size_of(self.blob_path(sha256)) is None:
                raise InputError(f"{self.blob_path(sha256)}: expected a file that {path.name} names, found none")
        return entry

    def take(self, sha256: str, target: Path) -> None:
        """Copy a blob to a new file. Raises InputError, and deletes the blob, for a digest other than its name."""
        source = self.blob_path(sha256)
        # Touch first, so that a clean-up by age does not delete the blob while it is copied.
        _touch(source)
        try:
            _copy(source, sha256, target)
        except InputError:
            _delete(source)
            raise

    def add(self, source: Path, sha256: str) -> None:
        """Put the file `source` in, unless it is there, whole. Raises InputError when it is not of this sha256."""
        path = self.blob_path(sha256)
        if size_of(path) == source.stat().st_size and sha256_file(path) == sha256:
            # Otherwise a clean-up by age could delete it before the new entry is written.
            return _touch(path)
        with atomic_path(path, secrets.token_hex(8)) as temporary:
            shutil.copyfile(source, temporary)
            actual = sha256_file(temporary)
            if actual != sha256:
                raise InputError(f"{source}: expected sha256 {sha256}, found {actual}: the file has changed")

    def write(self, entry: Statement) -> None:
        with atomic_path(self.entry_path(entry.key.sha256), secrets.token_hex(8)) as temporary:
            temporary.write_bytes(entry.to_bytes())


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that may only be read
        path.unlink()


def _touch(path: Path) -> None:
    """Set the time of a file's last use, where the cache can be written."""
    with contextlib.suppress(OSError):
        os.utime(path)


def cache_for(job: Job, configured: str) -> Cache | None:
    """Return the cache for a job; None where there is none, or artefacts of its stage are not cached."""
    if not STAGES[job.stage].is_cached:
        return None
    folder = cache_folder(configured)
    return Cache(folder) if folder else None


def take(cache: Cache | None, job: Job, key: BuildKey) -> bool:
    """Restore the artefact with this build key to the output of `job`; return False where it must be made."""
    if cache is None:
        return False
    name = key.sha256
    try:
        entry = cache.read(name)
        if entry is None:
            return False
        _restore(job, entry, cache.entry_path(name), cache.take)
    except LockstepError as error:
        # Otherwise every job with this key would try it again.
        _delete(cache.entry_path(name))
        _say(f"{error}; {job} is made again")
        return False
    except OSError as error:
        _say(f"{cache.folder}: expected to take {job} from it, found: {error}; it is made again")
        return False
    _touch(cache.entry_path(name))
    _say(f"{job} is taken from {cache.folder}, build key {name[:12]}: nothing was computed")
    return True


def put(cache: Cache | None, job: Job, statement: Statement) -> None:
    """Put the new artefact of `job`, with the files of its statement, into the cache."""
    # A manifest that names files of other folders is valid in one place only.
    if cache is None or not _is_whole(job.output, statement.outputs):
        return
    try:
        _check_unchanged(job, statement.key)
        for name, sha256 in sorted(statement.outputs.items()):
            cache.add(job.output.parent / name, sha256)
        cache.write(statement)
    except InputError as error:
        _say(f"{job} is not put into {cache.folder}: {error}")
    except OSError as error:
        _say(f"{cache.folder} cannot be written ({error.strerror}): {job} is not put into it")
    else:
        _say(f"{job} is put into {cache.folder}, build key {statement.key.sha256[:12]}")


def take_of_other(job: Job, key: BuildKey) -> bool:
    """Copy the artefact of another model here that has this build key, as a fine-tune's base; False if none has."""
    stage = STAGES[job.stage]
    root = job.output.parents[len(Path(stage.output).parts) - 1]  # the results folder
    if not stage.is_cached or "model" not in job.names or root / stage.output.format(**job.names) != job.output:
        return False
    others = root.glob(stage.output.format(**{**job.names, "model": "*"}))
    for manifest in sorted(set(others) - {job.output}):
        try:
            entry = read_statement(manifest)
            if entry is None or entry.key.sha256 != key.sha256:
                continue
            _restore(job, entry, statement_path(manifest), _copier(manifest.parent, entry))
        except (LockstepError, OSError):
            continue  # it is damaged, or made at this moment
        model = manifest.relative_to(root).parts[0]
        print(f"{REUSED}{job} is that of {model}, of the same build key", file=sys.stderr)
        return True
    return False


def _copier(folder: Path, entry: Statement) -> Callable[[str, Path], None]:
    """Return a function that copies the file of a sha256 from the artefact in `folder` to a new file."""
    # Files of equal content share an entry; any of them can be copied.
    paths = {sha256: folder / name for name, sha256 in entry.outputs.items()}
    return lambda sha256, target: _copy(paths[sha256], sha256, target)


def _restore(job: Job, entry: Statement, where: Path, take: Callable[[str, Path], None]) -> None:
    """Copy an artefact, whose entry is of the file `where`. take: copies the file of a sha256 to a new one."""
    folder = job.output.parent
    output = job.output
    outputs = entry.outputs
    for name in outputs:
        remove_leftovers(folder / name)
    # The manifest is checked first and gets its name last: a run that is killed leaves files without a manifest.
    with atomic_path(output) as manifest:
        if output.name in outputs:
            take(outputs[output.name], manifest)
        if output.name not in outputs or not _is_whole(manifest, outputs):
            raise InputError(f"{where}: expected all files of {output.name}, found others")
        for path in (output, statement_path(output)):
            path.unlink(missing_ok=True)
        for name in outputs.keys() - {output.name}:
            with atomic_path(folder / name) as temporary:
                take(outputs[name], temporary)
            remember(folder / name, outputs[name])
    # Where no other artefact shares the folder (its manifest has a fixed name), files of an earlier one are deleted.
    if "{" not in Path(STAGES[job.stage].output).name:
        clear_unnamed(output, lambda path: path.suffix in _SUFFIXES)


def _copy(source: Path, sha256: str, target: Path) -> None:
    """Copy a file. Raises InputError when it is not of this sha256."""
    shutil.copyfile(source, target)
    actual = sha256_file(target)
    if actual != sha256:
        raise InputError(f"{source}: expected sha256 {sha256}, found {actual}: the file is damaged")


def _is_whole(manifest: Path, outputs: Mapping[str, str]) -> bool:
    """Return whether all files of a manifest are among `outputs`, {path relative to it: sha256}."""
    return all(
        outputs.get(os.path.relpath(file.path, manifest.parent)) == file.sha256 for file in named_files(manifest)
    )


def _check_unchanged(job: Job, key: BuildKey) -> None:
    """Raise InputError when inputs or code changed since the key was computed: the artefact may be of the new ones."""
    inputs = {path: (content(path), key.inputs[name]) for name, path in job.inputs.items()}
    code = code_digests(STAGES[job.stage].module, job.backend)
    parts = {Path(part): (digest, key.code.get(part)) for part, digest in code.items()}
    for path, (now, before) in {**inputs, **parts}.items():
        if now != before:
            raise InputError(f"{path} changed while it was made")


def _say(line: str) -> None:
    print(f"cache: {line}", file=sys.stderr)
