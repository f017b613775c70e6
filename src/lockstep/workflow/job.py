"""The function of every rule's script: run a stage's job, with its output in the rule's log."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.sources import REPOSITORY
from lockstep.errors import NOTE, PREFIX, guard
from lockstep.progress import shown_on
from lockstep.provenance.locked import find_lock, is_locked
from lockstep.provenance.run import forget_other, run
from lockstep.stages import STAGES, Job

_NO_OPTIONS = ("stage", "device", "folders")  # parameters of a rule that are no options of its stage


def run_stage(snakemake: Any) -> None:
    with logged(snakemake):
        run_job(snakemake)


def run_job(snakemake: Any, **extra: Any) -> None:
    """Run the stage as `run_stage` does, in a script that has opened its log. extra: parameters that no rule has."""
    stage = STAGES[snakemake.params.stage["name"]]
    inputs = {key: snakemake.input.get(key) for key in stage.rule.inputs}
    files = {key: snakemake.input.get(key) or snakemake.params.get(key) for key in stage.rule.files}
    options = {key: value for key, value in snakemake.params.items() if key not in _NO_OPTIONS and value is not None}
    job = Job(
        stage=stage.name,
        names=dict(snakemake.wildcards.items()),
        inputs={key: Path(path) for key, path in inputs.items() if path},
        options=options,
        output=Path(snakemake.output[0]),
        device=snakemake.params.get("device"),
        threads=snakemake.threads,
        files={key: _files(value) for key, value in files.items()},
        extra=extra,
    )
    try:
        run(job, lock_file=lock_file(snakemake), cache=snakemake.config.get("cache", ""))
    except BaseException:
        forget_other(job)
        raise


def _files(value: Any) -> Any:
    """Return an input's or parameter's files as in `Job.files`: Snakemake gives a path, several, or none."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str):
        return [value]
    return list(value or [])


@contextlib.contextmanager
def logged(snakemake: Any) -> Iterator[None]:
    """Send stdout and stderr, also those of native libraries, to the rule's log.

    A user's mistake becomes one line there and on the terminal, before Snakemake's lines, and so do a stage's notes.
    """
    # Native libraries write to the descriptors themselves, so these are redirected, not Python's streams.
    terminal = os.dup(2)
    log = Path(snakemake.log[0])
    try:
        with guard(), open(log, "w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            with shown_on(terminal):
                yield
    except SystemExit as error:
        # The run itself reports Ctrl-C, once for all jobs.
        if error.code != 128 + signal.SIGINT:
            _tell(terminal, log, PREFIX, last=1)
        raise
    _tell(terminal, log, NOTE)


def _tell(terminal: int, log: Path, prefix: str, last: int = 0) -> None:
    if not log.exists():
        return
    lines = log.read_text(errors="replace").splitlines()
    for line in [line for line in lines if line.startswith(prefix)][-last:]:
        os.write(terminal, f"{line}\n".encode())


def lock_file(snakemake: Any) -> Path | None:
    """Return the lock that the job must match, in a run with `--config locked=true`; None for a job of all models."""
    if not is_locked(snakemake.config) or "model" not in snakemake.wildcards.keys():
        return None
    return find_lock(snakemake.wildcards.model, [Path(), REPOSITORY])
