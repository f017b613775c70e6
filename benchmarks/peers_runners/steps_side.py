"""A process that decodes when it is asked to, which these scripts share.

`benchmarks.small_weights` keeps them open beside its own contestants.

In: `script.py JOB`, where JOB is JSON: "checkpoint" and "out" are folders, "threads", "batch" (the largest), "capacity"
(tokens of a request) and "cpu_time" (seconds are those of the CPU, not of a clock). Then a line of JSON on stdin for
each measurement: {"batch", "context", "steps"} times decode steps behind a prompt, {"prompt"} a prompt of so many
tokens. Out: a line of JSON on stdout for each, first one of {"versions"}, then {"seconds"} of a step or of the prompt.
What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
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

    A model that is there is not made again.
    """
    answers, job = os.fdopen(os.dup(1), "w"), json.loads(sys.argv[1])
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    made = Path(job["out"]) / "made"
    if not made.is_file():
        make(job)
        made.touch()
    start, clock = opened(job), time.process_time if job["cpu_time"] else time.perf_counter
    answer({"versions": {name: metadata.version(name) for name in sorted(packages)}})
    vocabulary = json.loads((Path(job["checkpoint"]) / "config.json").read_text())["vocab_size"]
    for line in sys.stdin:
        asked = json.loads(line)
        shape = (1, asked["prompt"]) if "prompt" in asked else (asked["batch"], asked["context"])
        prompts = np.random.default_rng(0).integers(3, min(vocabulary, 256), shape)
        began = clock()
        step = start(prompts)
        steps = asked.get("steps", 0)
        if steps:
            step()  # the first may take its token from the prompt's logits
            began = clock()
            for _ in range(steps):
                step()
        answer({"seconds": (clock() - began) / max(steps, 1)})
