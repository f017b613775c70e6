"""Running of one step: its artefact, and its record beside it.

Where a lock holds the artefact, nothing else than what is locked is made.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.files import check_place, remove_leftovers, write_bytes, write_json
from lockstep.errors import ENDING, InputError, LockstepError
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import failed_path
from lockstep.pipeline.stages import REPORTS, STAGES, entry_of
from lockstep.pipeline.step import JobSpec
from lockstep.provenance import locked
from lockstep.provenance.cache.reuse import cache_for, put, take
from lockstep.provenance.record import build_key, checked_record, outputs_of, read_record, record_path, write_record
from lockstep.provenance.slsa import now, provenance_path, write_provenance


def run(step: JobSpec, make: Callable[[], Any], lock_file: Path | None = None, cache: str = "") -> Any:
    """Make the artefact of `step` with `make`, whose result is given, and record it.

    lock_file: raises CheckError for anything else than what it locks. cache: the shared cache that the config names;
    what it has, and is locked, is taken from there, and the path of its manifest given. Raises InputError for an input
    that is damaged or is not the one recorded.
    """
    check_place(step.output)  # before hours of work
    shared = cache_for(step, cache)
    with _reported(step):
        for path in step.inputs.values() if step.stage != "summary" else ():  # whose rows say what is wrong
            check_input(path)
    key, started = build_key(step), now()
    if lock_file is not None:
        locked.check_step(step, key, lock_file)
    with _all_or_nothing(step):
        taken = take(shared, step, key) and _is_locked(step, key, lock_file)
        with _reported(step):
            made = step.output if taken else make()
        if step.stage == "build" and not taken:  # before the record: where there is one, there is the other
            write_provenance(step, key, started)
        record = write_record(step, key)
    if lock_file is not None:
        locked.check_output(step.output, lock_file)
    if not taken:
        put(shared, step, record)
    return made


def _is_locked(step: JobSpec, key: BuildKey, lock_file: Path | None) -> bool:
    """Return whether what the cache gave is what the lock says.

    Else it is taken away again, and the cache has nothing.
    """
    if lock_file is None:
        return True
    write_record(step, key)
    line = locked.reject(step.output, lock_file)
    if line:
        print(
            f"cache: {line} in what was taken, which is not what {lock_file} says; {step} is made anew", file=sys.stderr
        )
    return not line


@contextlib.contextmanager
def _reported(step: JobSpec) -> Iterator[None]:
    """Leave the report of a check that fails, with the reason.

    Where it fails before it has one, the reason alone is left. Not where it is interrupted.
    """
    report = failed_path(step.output)
    before = _state(report)
    try:
        yield
    except (Exception, SystemExit) as error:
        ended = error if isinstance(error, SystemExit) else None
        if entry_of(step).is_judged and _state(report) == before and not (ended and ended.code in _INTERRUPTED):
            line = (
                (f"{step.stage} ended with exit code {ended.code}; its log says why")
                if ended
                else " ".join(f"{_kind(error)}{error}".split())
            )
            with contextlib.suppress(InputError, OSError):  # a full disk: what was raised says so
                write_json(
                    report,
                    {
                        "format": formats.FAILURE,
                        "stage": step.stage,
                        "names": dict(step.names),
                        "result": "fail",
                        "failure": line,
                    },
                )
        raise


_INTERRUPTED = tuple(128 + number for number in (signal.SIGINT, *ENDING))


def _kind(error: BaseException) -> str:
    return "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "


def _state(path: Path) -> tuple[int, int] | None:
    """Return what changes whenever a file is written anew."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None


@contextlib.contextmanager
def _all_or_nothing(step: JobSpec) -> Iterator[None]:
    """Take the record of an earlier artefact away, and its provenance.

    A run that is killed then leaves none that is wrong. Where the work fails, an artefact that it did not touch gets
    them back, and a new one without a record goes. What has no record is not gone on with.
    """
    output = step.output
    if entry_of(step).continues and not _is_recorded(output):
        output.unlink(missing_ok=True)
    about = [record_path(output), *([provenance_path(output)] if step.stage == "build" else [])]
    before = digest(output) if output.is_file() else None
    earlier = {path: path.read_bytes() for path in about if path.is_file()} if _is_recorded(output) else {}
    for path in about:
        path.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        if not output.is_file() or digest(output) != before or not _is_whole(step, earlier.get(record_path(output))):
            for path in (output, *about, *step.beside):
                path.unlink(missing_ok=True)
        else:
            for path, data in earlier.items():
                write_bytes(path, data)
        raise
    for path in (output, *about, *step.beside):
        remove_leftovers(path)


def _is_whole(step: JobSpec, record: bytes | None) -> bool:
    """Return whether the manifest and what lies beside it are as its record says.

    record: None where it has none.
    """
    try:
        return record is None or outputs_of(step.output, step.beside) == json.loads(record)["outputs"]
    except (FileNotFoundError, LockstepError):
        return False


def _is_recorded(output: Path) -> bool:
    try:
        return read_record(output) is not None
    except LockstepError:
        return False  # damaged: made anew with the artefact


def check_input(path: Path) -> None:
    """Raise InputError when the manifest `path` is not the one that was recorded.

    It is damaged, put there by hand, or left by a stage that was killed.
    """
    record = record_path(path)
    if path.suffix != ".json" or not path.is_file():
        return  # an absent one is named by whoever reads it
    if not record.is_file():
        raise InputError(
            f"{path}: expected its record {record.name} beside it, found none: nothing says how "
            f"it was made; make it again, by its stage or snakemake"
        )
    recorded = checked_record(record)
    expected, found = recorded.outputs.get(path.name), digest(path)
    if found != expected:
        raise InputError(
            f"{path}: expected sha256 {expected} as {record.name} says, found {found}: it was "
            f"changed after it was made; delete it and run again"
        )


def from_rule(
    rule: str, names: dict[str, str], inputs: dict[str, Any], params: dict[str, Any], outputs: list[str]
) -> JobSpec:
    """Return the step of a Snakemake job.

    inputs by name: a path, or a list of paths. Of a stage, those that the table of stages says it reads; of a report,
    all results that it shows. params: of the rule; `options` are the stage's, and of others all but the key.
    """
    if rule in STAGES:
        read = {name: Path(inputs[name]) for name in STAGES[rule].inputs(names.get("precision"))}
        return JobSpec(
            rule, names, read, params["options"], Path(outputs[0]), (), params.get("python"), params.get("device")
        )
    shown = {name: Path(path) for name, path in inputs.items() if isinstance(path, str)}
    shown |= {path: Path(path) for paths in inputs.values() if isinstance(paths, list) for path in paths}
    options = {name: value for name, value in params.items() if name != "key"}
    return JobSpec(
        rule, names, shown if rule in REPORTS else {}, options, Path(outputs[0]), tuple(map(Path, outputs[1:]))
    )
