"""The one door to another Python, in which a backend's library is installed.

    main() < request.json       {"call": "module:function", "arguments": {...}, "key": "..."}

In: the job of a stage, or a function by name with its arguments as JSON, and the config's key that names this
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
from typing import TYPE_CHECKING, Any

from lockstep import processes
from lockstep.errors import ENDING, PREFIX, CheckError, InputError, guard

if TYPE_CHECKING:
    from lockstep.stages.stage import Job

_OLDEST = (3, 10)
_KEY = "LOCKSTEP_INTERPRETER_KEY"  # in a worker's environment: the config's key that names its interpreter


def run(job: Job) -> None:
    """Run a stage's job in the interpreter that it names.

    Raises InputError for an interpreter that does not start, CheckError for one that is killed. When the stage fails
    there, it has said why on stderr, and this process exits with the same code (SystemExit).
    """
    parts = {name: getattr(job, name) for name in ("stage", "names", "options", "device", "threads")}
    inputs = {name: str(path) for name, path in job.inputs.items()}
    call(job.python, f"{__name__}:_run_job", **parts, inputs=inputs, output=str(job.output))


def _run_job(inputs: Mapping[str, str], output: str, **parts: Any) -> None:
    from lockstep.stages import STAGES, Job

    job = Job(inputs={name: Path(path) for name, path in inputs.items()}, output=Path(output), **parts)
    STAGES[job.stage].run(job)


def call(python: str | None, function: str, /, **arguments: Any) -> None:
    """Call a function here or in the interpreter `python` (a path or a command).

    function: `module:name`. arguments: JSON. Errors as of `run`.
    """
    _run(python, function, arguments, None)


def ask(python: str | None, function: str, /, **arguments: Any) -> Any:
    """Call a function as `call` does, and return its answer, which is JSON.

    An error there is the same error here: InputError or CheckError.
    """
    return _run(python, function, arguments, subprocess.PIPE)


def _run(python: str | None, function: str, arguments: Mapping[str, Any], pipe: int | None) -> Any:
    if python is None:
        return function_named(function)(**arguments)
    key = _interpreter_key()
    request = json.dumps({"call": function, "arguments": arguments, "key": key})
    try:
        ended = processes.run(
            [python, "-c", "from lockstep.stages.worker import main; main()"],
            request,
            env={**processes.environment(python, *_outside(function)), _KEY: key},
            stdout=pipe,
            stderr=pipe,
        )
    except OSError as error:
        raise InputError(f"{key}: expected a Python interpreter, found {python!r}: {error.strerror}") from None
    if name := _signal(ended.returncode):
        print(ended.stderr or "", file=sys.stderr)  # ends the line that it left unfinished
        raise CheckError(
            f"{arguments.get('stage', function)}: {python} was ended by {name} (memory or time ran out?); "
            "what it was at stands in the line before"
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


def function_named(name: str) -> Callable[..., Any]:
    """Return the function that `module:name` names."""
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(module), function)


def _outside(function: str) -> list[Path]:
    """Return the folders of a function's package, where it is not this one."""
    package = function.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package) if package != "lockstep" else None
    return [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]


def _signal(code: int) -> str | None:
    """Return the signal that ended a process; None where none did.

    Also of one behind a shell, which then ends with 128 and its number. Of an interrupt, SIGTERM and SIGHUP a stage
    says itself that they ended it, with that code: None too.
    """
    number = -code if code < 0 else code - 128
    said = code == -signal.SIGINT or code - 128 in (signal.SIGINT, *ENDING)
    return signal.Signals(number).name if number in set(signal.Signals) and not said else None


def main() -> None:
    sys.path.append("")  # the working directory, last: a function of the user's may lie there
    with guard():
        request = json.load(sys.stdin)
        if sys.version_info < _OLDEST:
            raise InputError(
                f"{request['key']}: expected Python {'.'.join(map(str, _OLDEST))} or newer, found "
                f"{sys.version.split()[0]} ({sys.executable})"
            )
        try:
            answer = function_named(request["call"])(**request["arguments"])
            if answer is not None:
                print(json.dumps(answer))
        except BrokenPipeError:
            raise SystemExit(1) from None  # the reader has closed the pipe
        except ModuleNotFoundError as error:
            raise InputError(
                f"{request['key']}: {sys.executable} has no Python package {error.name!r}; install it there"
            ) from None
