"""How fast do small weights decode on a CPU: bf16, w8a16 and w4a16 beside fp32, in one process, in turn.

In: a checkpoint folder or a shape, batch sizes, group sizes, backends. Out: seconds of a decode step and of a prompt of
each, the ratio to ONNX Runtime's fp32 round by round, and what bounds it: the bytes of weights that a step reads over
the bandwidth of memory, which is measured in the same run.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks.decode import decoding, prepare, time_steps
from benchmarks.export import SHAPES, shape_names
from benchmarks.measure import in_turn, ratios, spread, surroundings, thread_count
from lockstep.artifacts.files import read_json
from lockstep.backends.onnxruntime.cpu import THREADS_VARIABLE
from lockstep.config.backends import backends as known_backends

PACKAGES = ("numpy", "onnxruntime")
BACKENDS = ("onnxruntime", "openvino")
FULL = "fp32"  # of ONNX Runtime, as all without another backend's name
PRECISIONS = ("fp32", "bf16", "w8a16", "w4a16")
Clock = Callable[[], float]
_READ_BYTES = 1 << 29  # more than any cache holds


def run(
    model: str,
    batches: Sequence[int],
    groups: Sequence[int],
    context: int = 64,
    steps: int = 32,
    prompt: int = 512,
    rounds: int = 5,
    threads: int | None = None,
    cpu_time: bool = False,
    backends: Sequence[str] = BACKENDS,
    precisions: Sequence[str] = PRECISIONS,
) -> dict[str, Any]:
    """Measure at each batch size; `context` tokens are in the cache when the `steps` timed steps of a round begin.
    prompt: tokens of one that is timed, too. cpu_time: take one thread, and the process's CPU seconds, which other work
    on the machine moves less; the bandwidth is still of wall time. backends, precisions: those to measure, beside ONNX
    Runtime's fp32; a precision that a backend or the CPU lacks is in the record with the reason."""
    threads, clock = (1, time.process_time) if cpu_time else (threads, time.perf_counter)
    count = thread_count(threads)
    os.environ[THREADS_VARIABLE] = str(count)  # of the builds too: a process has one pool
    with tempfile.TemporaryDirectory() as work:
        folder = (
            lockstep.make_random_checkpoint(SHAPES / f"{model}.json", 0, Path(work) / model)
            if model in shape_names()
            else Path(model)
        )
        made, lacking = _made(folder, Path(work), groups, backends, precisions)
        sizes = {name: _bytes_of_a_step(paths) for name, paths in made.items()}
        measured = {str(batch): _measure(made, batch, context, steps, rounds, count, clock) for batch in batches}
        prompts = _prompts(made, prompt, rounds, count, clock)
        bandwidth = _bandwidth(count)
    used = ["openvino"] if any(name.startswith("openvino") for name in made) else []
    bounds = {name: round(size / bandwidth, 6) for name, size in sizes.items()}
    return {
        "benchmark": "small_weights", "model": folder.name, "context": context, "steps": steps, "rounds": rounds,
        "seconds_of": "CPU time, one thread" if cpu_time else "wall time",
        "megabytes_of_weights_a_step": {name: round(size / 1e6, 1) for name, size in sizes.items()},
        "memory_gigabytes_per_s": round(bandwidth / 1e9, 1), "seconds_to_read_the_weights": bounds, "batch": measured,
        "prompt": {"tokens": prompt, **prompts}, "not_measured": lacking, "cpu_name": _cpu_name(),
        **surroundings(*PACKAGES, *used, threads=threads),
    }  # fmt: skip


def _made(
    folder: Path, work: Path, groups: Sequence[int], backends: Sequence[str], precisions: Sequence[str]
) -> tuple[dict[str, dict[str, Path]], dict[str, str]]:
    """The contestants' files by name, ONNX Runtime's fp32 first; and why others are none."""
    made = {FULL: prepare(folder, FULL, work / FULL)}
    lacking: dict[str, str] = {}
    for backend in backends:
        own, settings = "" if backend == BACKENDS[0] else f"{backend} ", known_backends()[backend]
        for precision in precisions:
            reason = settings.missing() or settings.lacks_here(precision)
            if precision not in settings.precisions:
                reason = settings.lacks
            if reason:
                lacking[own + precision] = reason
                continue
            for group in groups if precision.startswith("w") else groups[:1]:
                name = f"{precision}, groups of {group}" if precision.startswith("w") else precision
                if own + name not in made:
                    made[own + name] = prepare(folder, precision, work / name.replace(", ", "-"), group, backend)
    return made, lacking


def _prompts(
    made: Mapping[str, Mapping[str, Path]], tokens: int, rounds: int, threads: int, clock: Clock
) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, 256, (1, tokens))

    def timed(start: Callable) -> float:
        began = clock()
        start(ids)
        return clock() - began

    return _compared(
        {name: functools.partial(timed, decoding(paths, 1, tokens + 1, threads)) for name, paths in made.items()},
        "seconds",
        rounds,
    )


def _compared(contestants: Mapping[str, Callable[[], float]], what: str, rounds: int) -> dict[str, Any]:
    times = in_turn(contestants, rounds)
    faster = {name: ratios({FULL: times[FULL], name: times[name]}, name)[FULL] for name in times if name != FULL}
    return {what: {name: spread(values) for name, values in times.items()}, "speed_relative_to_fp32": faster}


def _measure(
    made: Mapping[str, Mapping[str, Path]],
    batch: int,
    context: int,
    steps: int,
    rounds: int,
    threads: int,
    clock: Clock,
) -> dict[str, Any]:
    prompt = np.random.default_rng(0).integers(0, 256, (batch, context))
    contestants: dict[str, Callable[[], float]] = {
        name: functools.partial(time_steps, decoding(paths, batch, context + steps, threads), prompt, steps, clock)
        for name, paths in made.items()
    }
    return _compared(contestants, "seconds_per_step", rounds)


def _bytes_of_a_step(paths: Mapping[str, Path]) -> int:
    """Bytes of all weights that blocks read: all but the embedding, of which a step reads a row a token."""
    assembly, weights = read_json(paths["assembly"]), read_json(paths["weights"])["tensors"]
    parts = [layer["block"] for layer in assembly["layers"]] + [assembly["layers"][-1]["exit"]]
    names = {name for part in parts for tensors in part["slots"].values() for name in tensors}
    return sum(weights[name]["length"] for name in names)


def _cpu_name() -> str:
    """What the CPU calls itself."""
    found = re.search("^model name\\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else "unknown"


def _bandwidth(threads: int) -> float:
    """Bytes a second that all threads together read from memory: the best of some passes over one large array."""
    array = np.ones(_READ_BYTES // 8, np.float64)
    parts = np.array_split(array, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            began = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            best = max(best, array.nbytes / (time.perf_counter() - began))
    return best
