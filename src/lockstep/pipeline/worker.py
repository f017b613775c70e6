"""Run a stage in another Python, in which a backend's library is installed.

    python -m lockstep.pipeline.worker < request.json       {"stage": "build", "arguments": {...}, "key": "..."}

In: the name of a stage that runs engines (`engine_jobs`), its arguments as JSON, and the config's key that names this
interpreter. A stage works on files; errors are one line on stderr and an exit code, as everywhere. The other Python
needs what engines need, no more: neither Snakemake, torch nor pydantic. What TensorRT runs in may be older than what
Snakemake runs in.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep import processes
from lockstep.errors import ENDING, PREFIX, CheckError, InputError, guard

_PACKAGE = Path(__file__).resolve().parents[1]
_OLDEST = (3, 10)
_ENGINE_JOBS = "lockstep.pipeline.engine_jobs"
_KEY = "LOCKSTEP_INTERPRETER_KEY"  # in a worker's environment: the config's key that names its interpreter


def call(python: str | None, stage: str, /, **arguments: Any) -> None:
    """Run a stage here or in the interpreter `python` (a path or a command).

    stage: `build`, `compare`, `golden` or `generate` of `engine_jobs`, or any `module:function`. arguments: JSON.

    Raises InputError for an interpreter that does not start, CheckError for one that is killed. When the stage fails
    there, it has said why on stderr, and this process exits with the same code (SystemExit).
    """
    _run(python, stage, arguments, None)


def ask(python: str | None, stage: str, /, **arguments: Any) -> Any:
    """Run a stage as `call` does, and return its answer.

    stage: one that answers (`identity`, `inspect`, `bisect`). An error there is the same error here: InputError or
    CheckError.
    """
    return _run(python, stage, arguments, subprocess.PIPE)


def _run(python: str | None, stage: str, arguments: Mapping[str, Any], pipe: int | None) -> Any:
    if python is None:
        return function_named(stage)(**arguments)
    key = _interpreter_key()
    request = json.dumps({"stage": stage, "arguments": arguments, "key": key})
    # Another Python has other packages: of this one's it gets this package alone.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_folders(stage)), "PYTHONUTF8": "1", _KEY: key}
    try:
        ended = processes.run(
            [python, "-m", "lockstep.pipeline.worker"], request, env=environment, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise InputError(f"{key}: expected a Python interpreter, found {python!r}: {error.strerror}") from None
    if name := _signal(ended.returncode):
        print(ended.stderr or "", file=sys.stderr)  # ends the line that it left unfinished
        raise CheckError(
            f"{stage}: {python} was ended by {name} (memory or time ran out?); what it was at stands in the line before"
        )
    if pipe is None:
        if ended.returncode:
            raise SystemExit(ended.returncode)
        return None
    # a library may say more when it ends
    line = next((line for line in reversed(ended.stderr.splitlines()) if line.startswith(PREFIX)), "")
    errors = {error.exit_code: error for error in (InputError, CheckError)}
    if line and ended.returncode in errors:
        raise errors[ended.returncode](line.removeprefix(PREFIX))
    print(ended.stderr, end="", file=sys.stderr)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return json.loads(ended.stdout)


def _interpreter_key() -> str:
    if known := os.environ.get(_KEY):
        return known
    from lockstep.config.backends import interpreter_keys  # loads pydantic, which a worker's interpreter may not have

    return interpreter_keys()


def function_named(stage: str) -> Callable[..., Any]:
    """Return the function that `stage` names: of `engine_jobs`, or `module:function`."""
    module, _, name = stage.rpartition(":")
    return getattr(importlib.import_module(module or _ENGINE_JOBS), name)


def _folders(stage: str) -> list[str]:
    """Return where another interpreter finds this package, and that of `stage`."""
    package = stage.partition(":")[0].partition(".")[0] if ":" in stage else "lockstep"
    spec = importlib.util.find_spec(package) if package != "lockstep" else None
    outside = spec.submodule_search_locations if spec else None
    return [processes.import_folder(_PACKAGE), *(processes.import_folder(Path(folder)) for folder in outside or ())]


def _signal(code: int) -> str | None:
    """Return the signal that ended a process; None where none did.

    Also of one behind a shell, which then ends with 128 and its number. Of an interrupt, SIGTERM and SIGHUP a stage
    says itself that they ended it, with that code: None too.
    """
    number = -code if code < 0 else code - 128
    said = code == -signal.SIGINT or code - 128 in (signal.SIGINT, *ENDING)
    return signal.Signals(number).name if number in set(signal.Signals) and not said else None


def main() -> None:
    with guard():
        request = json.load(sys.stdin)
        if sys.version_info < _OLDEST:
            raise InputError(
                f"{request['key']}: expected Python {'.'.join(map(str, _OLDEST))} or newer, found "
                f"{sys.version.split()[0]} ({sys.executable})"
            )
        try:
            answer = function_named(request["stage"])(**request["arguments"])
            if answer is not None:
                print(json.dumps(answer))
        except BrokenPipeError:
            raise SystemExit(1) from None  # the reader has closed the pipe
        except ModuleNotFoundError as error:
            raise InputError(
                f"{request['key']}: {sys.executable} has no Python package {error.name!r}; install it there"
            ) from None


if __name__ == "__main__":
    main()
