"""The stages that run engines.

Arguments of JSON in; files, an answer of JSON, or text on stdout out. `worker` calls them by name, here or in the
Python that has the backend's library. Imports stand in the functions, so that a job loads what it needs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import dump_json
from lockstep.errors import CheckError
from lockstep.targets import Limits, Target, Tolerances


def identity(name: str, runs: bool = True) -> dict[str, Any]:
    """Return the libraries and the device that engines are built for.

    That is what a build key and a lock hold of a backend. runs: whether engines run, and are not only built.
    """
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
    if libraries := library.libraries(runs):
        found["libraries"] = libraries
    return {**found, "driver": device["driver"]} if "driver" in device else found


def versions(packages: list[str]) -> dict[str, str]:
    """Return the version of this Python and of each of `packages` that it has.

    The first is named `python`. Local parts such as +cpu are left out.
    """
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name).partition("+")[0]
    return found


def hardware(name: str, builds: bool) -> str | None:
    """Return the name of the GPU or CPU here that a backend runs on.

    Of a CPU its architecture. None where engines of any device can be built here and it `builds`.
    """
    from lockstep.backends import get_backend

    library = get_backend(name)
    describe = getattr(library, "describe_hardware", None)  # of a backend whose engines are for no one device
    if describe and builds:
        return None
    device = (describe or library.describe_device)()
    return str(device.get("name") or device.get("architecture"))


def inspect(engines: str, assembly: str) -> dict[str, Any]:
    """Return what of an engine set can be compared with another, as JSON.

    That is an `InspectedSet`, of engines that open here.
    """
    from lockstep.backends import EngineSet

    return EngineSet.open(engines, assembly).inspected().to_json()


def build(assembly: str, backend: str, out: str, options: Mapping[str, Any], owns_folder: bool = False) -> None:
    """Build an engine set.

    owns_folder: engines there that no manifest names are of a build that was killed, and go.
    """
    from lockstep import backends
    from lockstep.manifests.own_files import clear_unnamed

    if owns_folder:
        suffixes = backends.get_backend(backend).suffixes
        clear_unnamed(Path(out), lambda path: path.suffix in suffixes)
    backends.build(Path(assembly), backend, Path(out), options)


def compare(
    assembly: str,
    weights: str,
    engines: str,
    tolerance: float,
    limits: Mapping[str, int],
    seconds: float,
    out: str,
    threads: int | None = None,
) -> None:
    from lockstep.verify.compare import run

    run(Path(assembly), Path(weights), Path(engines), tolerance, Limits(**limits), Path(out), threads, seconds)


def golden(
    assembly: str,
    weights: str,
    engines: str,
    reference: str,
    target: Mapping[str, Any],
    tolerance: Mapping[str, Any],
    limits: Mapping[str, int],
    out: str,
    speed: str,
    expected: list[str | None],
    threads: int | None = None,
) -> None:
    """Run `golden.check_engines`.

    Where the engines are wrong, the line also says which one leaves its graph first.
    """
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
        from lockstep.artifacts.reports import GoldenReport
        from lockstep.onnx_tools.overflow import OVERFLOWS
        from lockstep.verify.bisect.explain import explain_failure
        from lockstep.verify.bisect.request import failing

        request, bounds = failing(paths[3], failed), replace(bounds, logits=GoldenReport.load(failed).tolerance)
        tokens = (request.tokens.ids.tolist(), request.tokens.num_prompt) if request else (None, None)
        why = explain_failure(*paths[:3], checked.layers, bounds, str(checked), *tokens)
        lines = (why, str(error)) if why.startswith(OVERFLOWS) else (str(error), why)
        raise CheckError("; ".join(lines)) from None


def adapted(
    assembly: str,
    weights: str,
    engines: str,
    adapters: str,
    adapted_reference: str,
    target: Mapping[str, Any],
    tolerance: Mapping[str, Any],
    limits: Mapping[str, int],
    out: str,
    expected: list[str | None],
    threads: int | None = None,
) -> None:
    from lockstep.verify.golden.adapted import check

    check(
        Path(assembly),
        Path(weights),
        Path(engines),
        Path(adapters),
        Path(adapted_reference),
        Target(**target),
        Tolerances(**tolerance),
        Limits(**limits),
        Path(out),
        expected,
        threads,
    )


def bisect(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    tolerance: Mapping[str, Any],
    tokens: list[Any],
    threads: int | None = None,
) -> dict[str, Any]:
    """Compare engines with graphs along tokens: `bisect.explain.engine_report`."""
    from lockstep.verify.bisect.explain import engine_report

    report = engine_report(
        Path(assembly), Path(weights), Path(engines), layers, Tolerances(**tolerance), tuple(tokens), threads=threads
    )
    return report.to_json()


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
    """Print the text as it is made; then the speed, on stderr.

    as_json: one document at the end, with both.
    """
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
    """Complete a file of prompts; on a terminal say how far it is.

    Raises CheckError, when all lines are through, for lines that failed.
    """
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
    requests = f"{done.lines} request{'s' * (done.lines != 1)}"
    print(f"{chr(13) if sys.stderr.isatty() else ''}{out}: {requests}, {done.failed} failed", file=sys.stderr)
    if done.failed:
        which = f"the first of {done.failed} requests that failed; " * (done.failed > 1)
        raise CheckError(f"{done.first_error} ({which}see {out})")
