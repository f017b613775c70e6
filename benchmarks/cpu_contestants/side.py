"""A contestant's process, which decodes when it is asked to.

In: `script.py JOB`, where JOB is JSON: "checkpoint" and "out" are folders, "precision", "threads", "batch" (the
largest) and "capacity" (tokens of a request). Then a line of JSON on stdin for each measurement: {"batch", "context",
"steps"} times decode steps after a prompt of "context" tokens, {"prompt"} a prompt of this length. Out: a line of JSON
on stdout for each: first {"versions", "resident_bytes"} once the model is open, then {"seconds", "peak_bytes"} of a
step or of the prompt. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

# start(prompts [batch, tokens] int64) runs them from an empty cache; the call that it gives takes a greedy step
Start = Callable[[np.ndarray], Callable[[], None]]


def main(packages: Sequence[str], make: Callable[[dict], None], opened: Callable[[dict], Start]) -> None:
    """Make the model of the command line's job, and answer until stdin ends.

    An existing model is kept. A new one is made in another process, whose libraries and memory are not counted.
    """
    answers = os.fdopen(os.dup(1), "w")
    job = json.loads(sys.argv[1])
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    done = Path(job["out"]) / "made"
    if not done.is_file():
        maker = multiprocessing.Process(target=make, args=(job,))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit(f"making the model ended with {maker.exitcode}")
        done.touch()
    vocabulary = json.loads((Path(job["checkpoint"]) / "config.json").read_text())["vocab_size"]
    start = opened(job)

    def prompts(*shape: int) -> np.ndarray:
        return np.random.default_rng(0).integers(3, min(vocabulary, 256), shape)

    start(prompts(1, 2))()
    versions = {name: metadata.version(name) for name in sorted(packages)}
    answer({"versions": versions, "resident_bytes": _resident_bytes()})
    for line in sys.stdin:
        request = json.loads(line)
        if "prompt" in request:
            ids = prompts(1, request["prompt"])
        else:
            ids = prompts(request["batch"], request["context"])
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        began = time.perf_counter()
        step = start(ids)
        steps = request.get("steps", 0)
        if steps:
            step()  # the first may take its token from the prompt's logits
            began = time.perf_counter()
            for _ in range(steps):
                step()
        answer({"seconds": (time.perf_counter() - began) / max(steps, 1), "peak_bytes": _peak_bytes()})


def _resident_bytes() -> int:
    """Return what the process holds in memory, mapped files that were read included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    """Return the most that it held since the peak was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10
