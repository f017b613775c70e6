"""Run a job: make its artefact and write its statement. With a lock, only locked artefacts are made."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.artifacts import formats
from lockstep.artifacts.files import check_place, remove_leftovers, write_json
from lockstep.artifacts.statement import Statement, statement_path
from lockstep.errors import ENDING, InputError, LockstepError
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import failed_path
from lockstep.provenance import locked
from lockstep.provenance.cache import cache_for, put, take, take_of_other
from lockstep.provenance.statements import build_key, read_statement, write_statement
from lockstep.stages import STAGES, Job

_INTERRUPTED = tuple(128 + number for number in (signal.SIGINT, *ENDING))  # exit codes of `errors.guard`


def run(job: Job, make: Callable[[], object] | None = None, lock_file: Path | None = None, cache: str = "") -> Path:
    """Make the artefact of a job, write its statement, and return its path.

    make: instead of the stage's own work. lock_file: raises CheckError where the artefact differs from it. cache: the
    config's shared cache, from which the artefact is copied where it is there and as locked. Raises InputError for an
    input that is damaged or is not the one of its statement.
    """
    stage = STAGES[job.stage]
    # Check before hours of work.
    check_place(job.output)
    shared = cache_for(job, cache)
    with _reported(job):
        for path in job.inputs.values():
            check_input(path)
    key = build_key(job)
    if lock_file is not None:
        locked.check_job(job, key, lock_file)
    try:
        # A stage that reads its own earlier output must not read one of which nothing says how it was made.
        if stage.rule.updates and not _is_stated(job.output):
            job.output.unlink(missing_ok=True)
        is_taken = take_of_other(job, key) or take(shared, job, key)
        if is_taken:
            statement = write_statement(job, key)
            if lock_file is not None and (line := locked.discard_different(job.output, lock_file)):
                reason = f"{line} in the cached artefact, which is not what {lock_file} says"
                print(f"cache: {reason}; {job} is made again", file=sys.stderr)
                is_taken = False
        if not is_taken:
            with _reported(job):
                make() if make else stage.run(job)
            statement = write_statement(job, key)
    except BaseException:
        # An output without a statement would not be read, but Snakemake would take it for done.
        if not _is_stated(job.output):
            for path in (job.output, statement_path(job.output)):
                path.unlink(missing_ok=True)
        raise
    for path in (job.output, statement_path(job.output)):
        remove_leftovers(path)
    if lock_file is not None and (line := locked.discard_different(job.output, lock_file)):
        locked.refuse(line, lock_file)
    # Only after the lock has accepted it: other runs take it from the cache.
    if not is_taken:
        put(shared, job, statement)
    return job.output


def forget_other(job: Job) -> None:
    """Delete the statement of an earlier artefact of other inputs, where this job has failed.

    Snakemake restores an output that it did not delete before the job, and considers the job done; no stage reads an
    artefact without a statement.
    """
    try:
        statement = read_statement(job.output)
        is_same = statement is not None and statement.key.sha256 == build_key(job).sha256
    except (LockstepError, OSError):
        is_same = False
    if not is_same:
        statement_path(job.output).unlink(missing_ok=True)


@contextlib.contextmanager
def _reported(job: Job) -> Iterator[None]:
    """Write a report with the error of a check that fails before it has written its own, unless it is interrupted."""
    report = failed_path(job.output)
    before = _file_state(report)
    try:
        yield
    except (Exception, SystemExit) as error:
        is_interrupted = isinstance(error, SystemExit) and error.code in _INTERRUPTED
        if STAGES[job.stage].is_judged and _file_state(report) == before and not is_interrupted:
            line = " ".join(str(error).split())
            if isinstance(error, SystemExit):
                line = f"{job.stage} ended with exit code {error.code}; its log says why"
            elif not isinstance(error, LockstepError):
                line = f"{type(error).__name__}: {line}"
            failure = {"stage": job.stage, "names": dict(job.names), "result": "fail", "failure": line}
            with contextlib.suppress(InputError, OSError):  # a full disk, which the error itself names
                write_json(report, {"format": formats.FAILURE, **failure})
        raise


def _file_state(path: Path) -> tuple[int, int] | None:
    """Return inode and time of a file, one of which changes whenever it is written again."""
    if not path.is_file():
        return None
    return path.stat().st_ino, path.stat().st_mtime_ns


def _is_stated(output: Path) -> bool:
    try:
        return read_statement(output) is not None
    except LockstepError:
        return False  # damaged: made again with the artefact


def check_input(path: Path) -> None:
    """Raise InputError when the manifest `path` is not the one of its statement: damaged, edited, or half made."""
    statement = statement_path(path)
    if path.suffix != ".json" or not path.is_file():
        return  # the stage itself reports a missing one
    if not statement.is_file():
        raise InputError(
            f"{path}: expected its statement {statement.name} in the same folder, found none: nothing says how "
            f"it was made; make it again with snakemake"
        )
    expected = Statement.load(statement).outputs.get(path.name)
    actual = digest(path)
    if actual != expected:
        raise InputError(
            f"{path}: expected sha256 {expected} as {statement.name} says, found {actual}: it was "
            f"changed after it was made; delete it and run again"
        )
