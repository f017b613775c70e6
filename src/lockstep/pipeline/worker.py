"""A stage in another Python: what TensorRT runs in may be older than what Snakemake runs in.

    python -m lockstep.pipeline.worker < request.json       {"stage": "build", "arguments": {...}, "key": "..."}

In: the name of a stage that runs engines, its arguments as JSON, and the config's key that names this interpreter. It
works on files; errors are one line on stderr and an exit code, as everywhere. Needs what engines need, no more: neither
Snakemake, torch nor pydantic.
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
from lockstep.artifacts.files import dump_json
from lockstep.errors import ENDING, PREFIX, CheckError, InputError, guard
from lockstep.targets import Limits, Target, Tolerances

_SOURCES = Path(__file__).resolve().parents[2]
_OLDEST = (3, 10)


def call(python: str | None, stage: str, /, **arguments: Any) -> None:
    """Run `build`, `compare`, `golden` or `generate` of this module, or any `module:function`, with these arguments
    (JSON), here or in the interpreter `python` (a path or a command).

    Raises InputError for an interpreter that does not start, CheckError for one that is killed. When the stage fails
    there, it has said why on stderr, and this process exits with the same code (SystemExit).
    """
    _run(python, stage, arguments, None)


def ask(python: str | None, stage: str, /, **arguments: Any) -> Any:
    """As `call`, for a stage that answers (`identity`, `inspect`, `bisect`): gives its answer. An error there is the
    same error here: InputError or CheckError."""
    return _run(python, stage, arguments, subprocess.PIPE)


def _run(python: str | None, stage: str, arguments: Mapping[str, Any], pipe: int | None) -> Any:
    if python is None:
        return function_named(stage)(**arguments)
    from lockstep.config.backends import interpreter_keys  # loads pydantic, which the other interpreter may not have

    key = interpreter_keys()
    request = json.dumps({"stage": stage, "arguments": arguments, "key": key})
    # Another Python has other packages: of this one's it gets this package alone.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_folders(stage)), "PYTHONUTF8": "1"}
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


def function_named(stage: str) -> Callable[..., Any]:
    """The function that `stage` names: one of this module, or `module:function` of another."""
    module, _, name = stage.partition(":")
    return getattr(importlib.import_module(module), name) if name else _STAGES[stage]


def _folders(stage: str) -> list[str]:
    """Where another interpreter finds this package, and the one that `stage` is of."""
    package = stage.partition(":")[0].partition(".")[0] if ":" in stage else "lockstep"
    spec = importlib.util.find_spec(package) if package != "lockstep" else None
    outside = spec.submodule_search_locations if spec else None
    return [str(_SOURCES), *(str(Path(folder).parent) for folder in outside or ())]


def _signal(code: int) -> str | None:
    """The signal that ended a process, or one behind a shell, which then ends with 128 and its number; None where none
    did. Of an interrupt, SIGTERM and SIGHUP a stage says itself that they ended it, with that code."""
    number = -code if code < 0 else code - 128
    said = code == -signal.SIGINT or code - 128 in (signal.SIGINT, *ENDING)
    return signal.Signals(number).name if number in set(signal.Signals) and not said else None


def identity(name: str) -> dict[str, Any]:
    """The library and the device that engines are built for: what a build key and a lock hold of a backend."""
    from lockstep.backends import get_backend  # loads the library: only where something is built or run

    library = get_backend(name)
    device = library.describe_device()
    found = {
        "name": name,
        "version": library.version(),
        "revision": library.revision,
        "device": library.device_key(device),
        "options": library.default_options(),
    }
    return {**found, "driver": device["driver"]} if "driver" in device else found


def hardware(name: str, builds: bool) -> str | None:
    """The name of the GPU here, or the architecture of the CPU, that a backend runs on; None where engines of any
    device can be built here and it `builds`."""
    from lockstep.backends import get_backend

    library = get_backend(name)
    describe = getattr(library, "describe_hardware", None)  # of a backend whose engines are for no one device
    if describe and builds:
        return None
    device = (describe or library.describe_device)()
    return str(device.get("name") or device.get("architecture"))


def inspect(engines: str, assembly: str) -> dict[str, Any]:
    """What of an engine set that opens here can be compared with another: an `InspectedSet`, as JSON."""
    from lockstep.backends import EngineSet
    from lockstep.backends.inspected import inspected

    return inspected(EngineSet.open(engines, assembly)).to_json()


def build(assembly: str, backend: str, out: str, options: Mapping[str, Any]) -> None:
    from lockstep import backends

    backends.build(Path(assembly), backend, Path(out), options)


def compare(
    assembly: str,
    weights: str,
    engines: str,
    tolerance: float,
    limits: Mapping[str, int],
    out: str,
    threads: int | None = None,
) -> None:
    from lockstep.verify.compare import run

    run(Path(assembly), Path(weights), Path(engines), tolerance, Limits(**limits), Path(out), threads)


def golden(
    assembly: str,
    weights: str,
    engines: str,
    reference: str,
    target: Mapping[str, Any],
    tolerance: Mapping[str, float],
    limits: Mapping[str, int],
    out: str,
    speed: str,
    expected: list[str | None],
    threads: int | None = None,
) -> None:
    """As `golden.check_engines`; where the engines are wrong, the line also says which one leaves its graph first."""
    from lockstep.verify.golden.check import check_engines
    from lockstep.verify.metrics import failed_path

    paths = (Path(assembly), Path(weights), Path(engines), Path(reference))
    checked, bounds = Target(**target), Tolerances(**tolerance)
    try:
        check_engines(*paths, checked, bounds, Limits(**limits), Path(out), Path(speed), expected, threads)
    except CheckError as error:
        failed = failed_path(out)
        if str(failed) not in str(error):  # it ended before anything was compared
            raise
        from lockstep.verify.bisect.explain import explain_failure
        from lockstep.verify.bisect.request import failing

        request = failing(paths[3], failed)
        tokens = (request.tokens.ids.tolist(), request.tokens.num_prompt) if request else (None, None)
        raise CheckError(
            f"{error}; {explain_failure(*paths[:3], checked.layers, bounds, str(checked), *tokens)}"
        ) from None


def bisect(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    tolerance: Mapping[str, float],
    tokens: list[Any],
    threads: int | None = None,
) -> dict[str, Any]:
    """Engine against graph along tokens: `bisect.explain.engine_report`."""
    from lockstep.verify.bisect.explain import engine_report

    return engine_report(
        Path(assembly), Path(weights), Path(engines), layers, Tolerances(**tolerance), tuple(tokens), threads=threads
    )


def generate(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    limits: Mapping[str, int],
    prompt: str,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    stop: list[str],
    threads: int | None = None,
    adapters: str | None = None,
    adapter: str | None = None,
    as_json: bool = False,
) -> None:
    """Text on stdout as it is made; then the speed, on stderr. as_json: one document at the end, with both."""
    from lockstep.runtime import Model, Sampling, Tokenizer
    from lockstep.runtime import generate as start

    sizes = Limits(**limits)
    model = Model.open(
        Path(engines),
        Path(assembly),
        Path(weights),
        layers,
        max_batch_size=1,
        max_seq_len=sizes.max_seq_len,
        max_num_tokens=sizes.max_num_tokens,
        threads=threads,
        adapters_json=adapters,
    )
    generation = start(
        model,
        Tokenizer.open(Path(assembly)),
        [prompt],
        max_new_tokens,
        Sampling(**sampling),
        stop,
        sizes.max_input_len,
        adapter=adapter,
    )
    for piece in generation:
        if not as_json:
            print(piece.text, end="", flush=True)
    speed = generation.speed
    if as_json:
        rates = {
            "prefill_tokens_per_s": speed.prefill_tokens_per_second,
            "decode_tokens_per_s": speed.decode_tokens_per_second,
        }
        print(dump_json({**generation.completions[0].record(), "speed": rates}), end="")
        return
    print(flush=True)
    for what, tokens, rate in (
        ("prefill", speed.prefill_tokens, speed.prefill_tokens_per_second),
        ("decode", speed.decode_tokens, speed.decode_tokens_per_second),
    ):
        print(f"{what}: {tokens} tokens, {rate:.0f} tokens/s", file=sys.stderr)


def generate_file(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    limits: Mapping[str, int],
    source: str,
    out: str,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    stop: list[str],
    threads: int | None = None,
    adapters: str | None = None,
    adapter: str | None = None,
) -> None:
    """A file of completions; on a terminal how far it is. Raises CheckError, when all lines are through, for lines that
    failed."""
    from lockstep.runtime import Model, Sampling, Tokenizer
    from lockstep.runtime.batch_file import Defaults, Done
    from lockstep.runtime.batch_file import generate_file as run
    from lockstep.runtime.request import Speed

    def say(done: Done, speed: Speed) -> None:
        if sys.stderr.isatty():
            rate = f"{speed.decode_tokens_per_second:.0f} tokens/s"
            print(f"\r{done.lines} requests done, {speed.decode_tokens} tokens, {rate} ", end="", file=sys.stderr)

    sizes = Limits(**limits)
    model = Model.open(
        Path(engines),
        Path(assembly),
        Path(weights),
        layers,
        max_batch_size=sizes.max_batch_size,
        max_seq_len=sizes.max_seq_len,
        max_num_tokens=sizes.max_num_tokens,
        threads=threads,
        adapters_json=adapters,
    )
    model.check_adapter(adapter)
    defaults = Defaults(max_new_tokens, Sampling(**sampling), tuple(stop), adapter)
    tokenizer = Tokenizer.open(Path(assembly))
    done = run(model, tokenizer, Path(source), Path(out), defaults, sizes.max_input_len, say)
    print(
        f"{chr(13) if sys.stderr.isatty() else ''}{out}: {done.lines} requests, {done.failed} failed", file=sys.stderr
    )
    if done.failed:
        raise CheckError(f"{done.first_error} (the first of {done.failed} requests that failed; see {out})")


_STAGES = {
    function.__name__: function
    for function in (identity, hardware, inspect, build, compare, golden, bisect, generate, generate_file)
}


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
