"""Snakemake's log as a person reads it: one line a job with its result, then the table of all targets.

    [12/58] golden     demo-llama/fp16/all/onnxruntime     pass   2.4e-02    3 s

Snakemake finds the module by its name: the workflow's profiles pass `--logger lockstep`. Messages of a dry run, of
`--verbose` and of anything but jobs are printed as Snakemake prints them. Its whole log is in `.snakemake/log`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from snakemake.logging import DefaultFormatter
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

_WILDCARDS = ("model", "precision", "layers", "backend")
_LOG_LINES = 20  # of a failed job's log
# What cuDNN's Python package prints at the end of a process that failed: 45 lines after the error.
_LEAKS = re.compile(r"nanobind: |See https://nanobind|\s*- (leaked |\.\.\. skipped remainder)")
# Snakemake prints these in each run; they tell a person nothing about the jobs.
_OF_EACH_RUN = (
    "Assuming unrestricted shared filesystem",
    "Building DAG of jobs",
    "CalledProcessError in file",
    "Cannot restore ",
    "Complete log(s)",
    "Conda environments: ignored",
    "Config file ",
    "Elapsed time",
    "Execute ",
    "Exiting because a job execution failed",
    "Provided ",
    "Removing output files of failed",
    "RuleException",
    "Rules claiming more threads",
    "Select jobs to execute",
    "Shutting down, this might",
    "Using shell",
    "Using workflow specific profile",
    "WorkflowError:\nAt least one job did not complete",
    "host:",
)
_REUSED = "reused: "  # of `provenance.cache`, which no plugin need import
_TARGET_RULES = ("all", "default")  # which run nothing: their inputs are what a run makes
_COLOURS = {"pass": "32", "FAIL": "31"}


@dataclass(frozen=True)
class _Job:
    rule: str
    target: str
    output: tuple[str, ...]
    log: tuple[str, ...]
    started: float


class LogHandler(LogHandlerBase):
    """Write a line for each job that has ended."""

    def __post_init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._total = self._done = 0
        self._has_verdict = self._is_interrupted = False
        self._stream: TextIO = sys.stderr
        if self.common_settings.stdout:
            self._stream = sys.stdout
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._in_colour = self._is_terminal and not self.common_settings.nocolor and not os.environ.get("NO_COLOR")
        self._as_snakemake = self.common_settings.dryrun or self.common_settings.verbose
        self._plain = DefaultFormatter(self.common_settings.quiet, self.common_settings.show_failed_logs)

    @property
    def writes_to_stream(self) -> bool:
        return True

    @property
    def writes_to_file(self) -> bool:
        return False

    @property
    def has_filter(self) -> bool:
        return False

    @property
    def has_formatter(self) -> bool:
        return True

    @property
    def needs_rulegraph(self) -> bool:
        return False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._emit(record)
        except BrokenPipeError:
            raise
        except Exception:
            self.handleError(record)

    def _emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if self._as_snakemake:
            return self._write(self._plain.format(record))
        values = vars(record)
        if event == LogEvent.RUN_INFO:
            stats = values["stats"]
            self._total = stats["total"] - sum(stats.get(rule, 0) for rule in _TARGET_RULES)
        elif event == LogEvent.JOB_INFO and values["rule_name"] not in _TARGET_RULES:
            self._jobs[values["jobid"]] = _job(values)
            self._show_running()
        elif event == LogEvent.JOB_FINISHED:
            self._end(values["job_id"], record.created)
        elif event == LogEvent.JOB_ERROR:
            if any(_interrupted(Path(path)) for path in values["log"]):
                self._is_interrupted = True
                return self._end(values["jobid"], record.created, "stopped")
            self._has_verdict = True
            self._end(values["jobid"], record.created, "FAIL")
            if message := values["rule_msg"]:  # an executor's: that a cluster ended the job, and why
                self._write(f"    {message}")
            for path in values["log"]:
                self._write("\n".join(f"    {line}" for line in (*_tail(Path(path)), f"log: {path}")))
        elif event in (None, LogEvent.ERROR, LogEvent.GROUP_ERROR, LogEvent.SHELLCMD):
            text = record.getMessage()
            if event:
                text = self._plain.format(record)
            self._has_verdict |= text.startswith("Nothing to be done")
            if text and not text.startswith(_OF_EACH_RUN):
                self._write(text)

    def _end(self, number: int, now: float, word: str = "") -> None:
        """Write the line of a job. word: its result, where it is not in its output."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        self._done += 1
        self._has_verdict |= job.rule == "summary"
        figure = ""
        if not word:
            word, figure = _result(job)
        padded = f"{word:<4}"
        if self._in_colour and word in _COLOURS:
            padded = f"\x1b[{_COLOURS[word]}m{padded}\x1b[0m"
        width = len(str(self._total))
        self._write(
            f"[{self._done:>{width}}/{self._total}] {job.rule:<19} {job.target:<38} {padded} {figure:>8} "
            f"{now - job.started:5.0f} s"
        )
        for path in job.log:
            for line in _tail(Path(path)):
                if line.startswith(_REUSED):
                    self._write(f"    {line}")
        self._show_running()

    def _write(self, text: str) -> None:
        if self._is_terminal:
            text = f"\r\x1b[K{text}"  # over the line of running jobs
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _show_running(self) -> None:
        """Show running jobs on the last line of a terminal."""
        if self._is_terminal and self._jobs:
            running = ", ".join(f"{job.rule} {job.target}" for job in self._jobs.values())
            self._stream.write(f"\r\x1b[K{running}"[: os.get_terminal_size(self._stream.fileno()).columns])
            self._stream.flush()

    def close(self) -> None:
        if self._is_terminal and self._jobs:
            self._write("")
        if self._has_verdict and not self._as_snakemake:
            self._has_verdict = False
            _print_verdict()
        if self._is_interrupted:
            from lockstep.errors import INTERRUPTED, KEPT

            self._is_interrupted = False
            self._write(f"lockstep: {INTERRUPTED}; {KEPT}")
        super().close()


def _job(values: dict[str, Any]) -> _Job:
    wildcards = values["wildcards"] or {}
    target = "/".join(str(wildcards[name]) for name in _WILDCARDS if name in wildcards)
    return _Job(values["rule_name"], target, tuple(values["output"]), tuple(values["log"] or ()), values["created"])


def _result(job: _Job) -> tuple[str, str]:
    """Return what a check found, and its first figure; nothing of another job."""
    from lockstep.errors import LockstepError
    from lockstep.report.checks import CHECKS

    check = next((check for check in CHECKS if check.name == job.rule), None)
    if check is None or not job.output:
        return "done", ""
    try:
        report = check.kind.load(Path(job.output[0]))
    except LockstepError:
        return "done", ""
    if not check.figures:
        return report.result, ""
    column, figure = next(iter(check.figures.items()))
    value = figure(report)
    if value is None:
        return report.result, ""
    return report.result, format(value, column.form or ".1e")


def _interrupted(path: Path) -> bool:
    """Return whether a job's log ends with the line of one that Ctrl-C stopped."""
    from lockstep.errors import INTERRUPTED, PREFIX

    return any(line.startswith(f"{PREFIX}{INTERRUPTED}") for line in _tail(path)[-1:])


def _tail(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    return [line for line in lines if not _LEAKS.match(line)][-_LOG_LINES:]


def _print_verdict() -> None:
    """Print the table of all targets, the verdict and what to do next, as `lockstep summary` does.

    Nothing where no run has come to a config yet, as of a part of the workflow.
    """
    from lockstep.cli.report import print_summary
    from lockstep.errors import LockstepError
    from lockstep.targets import Results

    tree = Results()
    if not tree.config().is_file():
        return
    try:
        print_summary(tree)
    except LockstepError as error:  # of a tree that another command damaged: the jobs' own lines stand above
        print(f"lockstep: {error}", file=sys.stderr)
