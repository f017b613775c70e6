"""Processes that start with Snakemake imported.

Its import takes longer than most of what tests run in it.

One server a test process, without the package: its children import that of the checkout they run in. It reads a
request a line from stdin, and answers each with the process's id, then with its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# What a plan of the workflow, or a command on its results, imports that is not this project's.
IMPORTED = (
    "snakemake.cli", "snakemake.logging", "snakemake.report", "snakemake.persistence.file", "snakemake.executors.local",
    "snakemake.scheduling.job_scheduler", "click", "nbformat", "numpy", "onnx", "pydantic", "rich.table", "smart_open",
    "yaml", "yte",
)  # fmt: skip


class ForkServer:
    """A server that forks processes, asked from this side.

    `run` is `subprocess.run` of `python -m module` with text captured and nothing on stdin.
    """

    def __init__(self) -> None:
        # not the variables of a test: a process gets its own
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, bufsize=0)
        atexit.register(self.close)

    def run(
        self, module: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess:
        """Raises subprocess.TimeoutExpired, once the process is killed."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            request = {
                "module": module,
                "arguments": list(arguments),
                "folder": str(folder),
                "environment": dict(environment),
                "streams": [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)],
            }
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            pid = self._answer(None)
            try:
                code = self._answer(timeout)
            except BaseException:  # the timeout, or an interrupt of the tests
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._answer(None)
                raise
            texts = [stream.seek(0) or stream.read() for stream in (out, err)]
        return subprocess.CompletedProcess([sys.executable, "-m", module, *arguments], code, *texts)

    def _answer(self, timeout: float | None) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout)
        line = self.process.stdout.readline()
        assert line, "the fork server has ended"
        return int(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


_SERVERS: list[ForkServer] = []


def run(*arguments: Any) -> subprocess.CompletedProcess:
    """`ForkServer.run` of the one of this process."""
    if not _SERVERS:
        _SERVERS.append(ForkServer())
    return _SERVERS[0].run(*arguments)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    def answer(number: int) -> None:
        answers.write(f"{number}\n".encode())
        answers.flush()

    for line in requests:
        pid = os.fork()
        if not pid:
            become(**json.loads(line))
        answer(pid)
        answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def become(module: str, arguments: list[str], folder: str, environment: dict[str, str], streams: list[str]) -> None:
    """Become `python -m module arguments` in `folder`.

    Stdout and stderr go to the files `streams`.
    """
    for number, stream in enumerate(["/dev/null", *streams]):
        opened = os.open(stream, os.O_RDWR | (os.O_APPEND if number else 0))
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, buffering=1) for number, mode in enumerate(["r", "w", "w"]))
    sys.__stdin__ = sys.stdin
    sys.__stdout__ = sys.stdout
    sys.__stderr__ = sys.stderr
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    os.chdir(folder)
    sys.path[0:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *arguments]
    time.tzset()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for item in IMPORTED:
        importlib.import_module(item)
    serve(*pipes)
