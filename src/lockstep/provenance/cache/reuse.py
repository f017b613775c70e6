"""The use of the cache by a step: its artefact is taken from it or put into it.

A step and its build key in. Every use is a line on stderr: in a job, in its log. Where the cache cannot be read, cannot
be written or is damaged, the line says so and the artefact is made as without a cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.artifacts.files import atomic_path, remove_leftovers
from lockstep.artifacts.statement import BuildKey, Statement, statement_path
from lockstep.errors import InputError, LockstepError
from lockstep.manifests.digest_cache import remember
from lockstep.manifests.manifest_files import content, named_files
from lockstep.manifests.own_files import clear_unnamed
from lockstep.provenance import code_identity
from lockstep.provenance.cache.store import Cache, cache_folder, delete, touch
from lockstep.stages import STAGES, Job

_SUFFIXES = (".onnx", ".engine", ".zip")


def cache_for(step: Job, configured: str) -> Cache | None:
    """Return the cache for a step; None where there is none or it is not cached.

    Raises InputError for a place where no cache can be.
    """
    folder = None
    if STAGES[step.stage].is_cached:
        folder = cache_folder(configured)
    return Cache(folder) if folder else None


def take(cache: Cache | None, step: Job, key: BuildKey) -> bool:
    """Restore the artefact with this build key to the output of `step`.

    Returns whether the cache has all of it; False: it must be made.
    """
    if cache is None:
        return False
    name = key.sha256
    try:
        entry = cache.read(name)
        if entry is None:
            return False
        _restore(cache, step, entry)
    except LockstepError as error:
        delete(cache.entry_path(name))
        _say(f"{error}; {step} is made again")
        return False
    except OSError as error:
        _say(f"{cache.folder}: expected to take {step} from it, found: {error}; it is made again")
        return False
    touch(cache.entry_path(name))
    _say(f"{step} is taken from {cache.folder}, build key {name[:12]}: nothing was computed")
    return True


def put(cache: Cache | None, step: Job, statement: Statement) -> None:
    """Put the new artefact of `step`, with the files of its statement, into the cache.

    Not one that names files of other folders: it is valid in one place only.
    """
    if cache is None or not _is_whole(step.output, statement.outputs):
        return
    try:
        _check_unchanged(step, statement.key)
        for name, sha256 in sorted(statement.outputs.items()):
            cache.add(step.output.parent / name, sha256)
        cache.write(statement)
    except InputError as error:
        _say(f"{step} is not put into {cache.folder}: {error}")
    except OSError as error:
        _say(f"{cache.folder} cannot be written ({error.strerror}): {step} is not put into it")
    else:
        _say(f"{step} is put into {cache.folder}, build key {statement.key.sha256[:12]}")


def _restore(cache: Cache, step: Job, entry: Statement) -> None:
    """Copy an artefact out of the cache.

    The manifest is checked first and written last, so no manifest is there after a run that was killed.
    """
    folder = step.output.parent
    output = step.output
    outputs = entry.outputs
    for name in outputs:
        remove_leftovers(folder / name)
    with atomic_path(output) as manifest:
        if output.name in outputs:
            cache.take(outputs[output.name], manifest)
        if output.name not in outputs or not _is_whole(manifest, outputs):
            path = cache.entry_path(entry.key.sha256)
            raise InputError(f"{path}: expected all files of {output.name}, found others")
        for path in (output, statement_path(output)):
            path.unlink(missing_ok=True)
        for name in outputs.keys() - {output.name}:
            with atomic_path(folder / name) as temporary:
                cache.take(outputs[name], temporary)
            remember(folder / name, outputs[name])
    # Where no other artefact shares the folder, files of an earlier one are deleted.
    if "{" not in Path(STAGES[step.stage].output).name:
        clear_unnamed(output, lambda path: path.suffix in _SUFFIXES)


def _is_whole(manifest: Path, outputs: Mapping[str, str]) -> bool:
    """Return whether all files of a manifest are among `outputs`, {path relative to it: sha256}."""
    return all(
        outputs.get(os.path.relpath(file.path, manifest.parent)) == file.sha256 for file in named_files(manifest)
    )


def _check_unchanged(step: Job, key: BuildKey) -> None:
    """Raise InputError when inputs or code changed since the key was computed: the artefact may be of the new ones."""
    inputs = {path: (content(path), key.inputs[name]) for name, path in step.inputs.items()}
    code = code_identity.code_digests(STAGES[step.stage].module, step.backend)
    parts = {Path(part): (digest, key.code.get(part)) for part, digest in code.items()}
    for path, (now, before) in {**inputs, **parts}.items():
        if now != before:
            raise InputError(f"{path} changed while it was made")


def _say(line: str) -> None:
    print(f"cache: {line}", file=sys.stderr)
