"""`small-weights`: decoding with small weights on a CPU: bf16 and quantised weights beside fp32.

All in one process, in turn.

In: a checkpoint folder or a shape, batch sizes, group sizes and backends. Out: seconds of a decode
step and of a prompt of each, the ratio to ONNX Runtime's fp32 round by round, and what bounds it: the bytes of weights
that a step reads over the bandwidth of memory, which is measured in the same run.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import options
from benchmarks.decode import decoding, prepare, time_steps
from benchmarks.measure import THREADS_VARIABLE, deliver, in_turn, read_json, spread, surroundings, thread_count
from benchmarks.shapes import checkpoint
from lockstep.config.backends import backends as known_backends

PACKAGES = ("numpy", "onnxruntime")
BACKENDS = ("onnxruntime", "openvino")
FULL = "fp32"  # of ONNX Runtime, as all without another backend's name
PRECISIONS = ("fp32", "bf16", "w8a16", "w4a16", "w8a8", "w4a8")
Clock = Callable[[], float]
_READ_BYTES = 1 << 29  # more than any cache holds
OPTIONS = (
    options.Option("--model", "As for decode, but one.", "llama-1024x8", metavar="FOLDER|SHAPE"), options.BATCHES,
    options.number("--prompt", 512, "Tokens of a timed prompt; 0: none.", 0),
    options.number("--group", (32, 128), "Group sizes.", name="groups", many=True),
    options.Option(
        "--backend", "Beside ONNX Runtime's fp32.", BACKENDS, name="backends", many=True, choices=BACKENDS
    ),
    options.Option(
        "--precision", "Of each backend that has it.", PRECISIONS, name="precisions", many=True, choices=PRECISIONS
    ),
    options.CONTEXT, options.STEPS, options.THREADS, options.CPU_TIME, options.rounds(), options.WRITE,
)  # fmt: skip


def main(write: Path | None, **settings: Any) -> None:
    """Measure a decode step in bf16 and with quantised weights beside fp32, in turn.

    The bandwidth of memory is measured too.
    """
    deliver(run(**settings), write)


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
    """Measure at each batch size, behind `context` tokens in the cache.

    The cache holds them when the `steps` timed steps of a round begin. prompt: tokens of one that is timed, too; 0 for
    none. cpu_time: take one thread, and the process's CPU seconds, which other work on the machine moves less; the
    bandwidth is still of wall time. backends, precisions: those to measure, beside ONNX Runtime's fp32; a precision
    that a backend or the CPU lacks is in the record with the reason.

    Each contestant is made, opened and measured in turn with fp32, and closed before the next one is made: a large
    model takes the memory and the disk of two.
    """
    threads, clock = (1, time.process_time) if cpu_time else (threads, time.perf_counter)
    count = thread_count(threads)
    os.environ[THREADS_VARIABLE] = str(count)  # of the builds too: a process has one pool
    wanted, lacking = _contestants(groups, backends, precisions)
    room = max(batches), max(context + steps, prompt) + 2
    measured = _Measured({batch: {} for batch in batches}, {}, {})
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint(model, Path(scratch))
        files = prepare(folder, FULL, Path(scratch) / FULL)
        measured.bytes[FULL], full = _bytes_of_a_step(files), _Opened(files, *room, count, clock)
        for name, (backend, precision, group) in wanted.items():
            made = Path(scratch) / "other"
            files = prepare(folder, precision, made, group, backend)
            measured.bytes[name] = _bytes_of_a_step(files)
            turns = {FULL: full, name: _Opened(files, *room, count, clock)}
            for batch in batches:
                calls = {of: functools.partial(one.steps, batch, context, steps) for of, one in turns.items()}
                measured.steps[batch][name] = in_turn(calls, rounds)
            if prompt:
                calls = {of: functools.partial(one.prompt, prompt) for of, one in turns.items()}
                measured.prompts[name] = in_turn(calls, rounds)
            del calls, turns
            gc.collect()
            shutil.rmtree(made)
        bandwidth = _bandwidth(count)
    used = ["openvino"] if any(name.startswith("openvino") for name in wanted) else []
    bounds = {name: round(size / bandwidth, 6) for name, size in measured.bytes.items()}
    return {
        "benchmark": "small_weights", "model": folder.name, "context": context, "steps": steps, "rounds": rounds,
        "seconds_of": "CPU time, one thread" if cpu_time else "wall time",
        "megabytes_of_weights_a_step": {name: round(size / 1e6, 1) for name, size in measured.bytes.items()},
        "memory_gigabytes_per_s": round(bandwidth / 1e9, 1), "seconds_to_read_the_weights": bounds,
        "batch": {str(batch): _compared(times, "seconds_per_step") for batch, times in measured.steps.items()},
        "prompt": {"tokens": prompt, **_compared(measured.prompts, "seconds")} if prompt else None,
        "not_measured": lacking, "cpu_name": _cpu_name(),
        **surroundings(*PACKAGES, *used, threads=threads),
    }  # fmt: skip


class _Measured(NamedTuple):
    """Seconds of each round, and bytes of weights that a step reads.

    Seconds are those of the contestant that was measured and of those that took turns.
    """

    steps: dict[int, dict[str, dict[str, list[float]]]]
    prompts: dict[str, dict[str, list[float]]]
    bytes: dict[str, int]


class _Opened:
    """A contestant of this project, opened for `batch` requests of `capacity` tokens."""

    def __init__(self, files: Mapping[str, Path], batch: int, capacity: int, threads: int, clock: Clock):
        self._start, self._clock = decoding(files, batch, capacity, threads), clock

    def steps(self, batch: int, context: int, steps: int) -> float:
        ids = np.random.default_rng(0).integers(0, 256, (batch, context))
        return time_steps(self._start, ids, steps, self._clock)

    def prompt(self, tokens: int) -> float:
        ids = np.random.default_rng(0).integers(0, 256, (1, tokens))
        began = self._clock()
        self._start(ids)
        return self._clock() - began


def _contestants(
    groups: Sequence[int], backends: Sequence[str], precisions: Sequence[str]
) -> tuple[dict[str, tuple[str, str, int]], dict[str, str]]:
    """Return (backend, precision, group size) by name, and why others are none.

    Without ONNX Runtime's fp32.
    """
    found: dict[str, tuple[str, str, int]] = {}
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
                if own + name != FULL:
                    found[own + name] = backend, precision, group
    return found, lacking


def _compared(measured: Mapping[str, Mapping[str, Sequence[float]]], what: str) -> dict[str, Any]:
    """Return each contestant's spreads, and its speed beside fp32 in the same rounds. Of fp32 itself, all rounds."""
    seconds: dict[str, list[float]] = {FULL: []}
    faster = {}
    for name, times in measured.items():
        seconds[FULL] += times[FULL]
        seconds[name] = list(times[name])
        faster[name] = spread([full / own for full, own in zip(times[FULL], times[name], strict=True)], 3)
    return {
        what: {name: spread(values) for name, values in seconds.items() if values},
        "speed_relative_to_fp32": faster,
    }


def _bytes_of_a_step(paths: Mapping[str, Path]) -> int:
    """Return the bytes of all weights that blocks read.

    All but the embedding, of which a step reads a row a token.
    """
    assembly, weights = read_json(paths["assembly"]), read_json(paths["weights"])["tensors"]
    parts = [layer["block"] for layer in assembly["layers"]] + [assembly["layers"][-1]["exit"]]
    names = {name for part in parts for tensors in part["slots"].values() for name in tensors}
    return sum(weights[name]["length"] for name in names)


def _cpu_name() -> str:
    """Return what the CPU calls itself."""
    found = re.search("^model name\\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else "unknown"


def _bandwidth(threads: int) -> float:
    """Return the bytes a second that all threads together read from memory.

    The best of some passes over one large array.
    """
    array = np.ones(_READ_BYTES // 4, np.int32)
    parts = np.array_split(array, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            began = time.perf_counter()
            list(pool.map(np.maximum.reduce, parts))  # a sum would wait for its adds
            best = max(best, array.nbytes / (time.perf_counter() - began))
    return best
