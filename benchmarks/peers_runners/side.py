"""What the scripts of this folder share: the job, timed decoding, the result.

In: `script.py export|decode JOB`, where JOB is JSON: "checkpoint" and "out" are folders, "result" is the file to write;
for decode also "threads", "context", "steps", "repeats" and "seed". Out: that file, with the versions, and for decode
seconds a step of each repeat, the tokens made and, in a .npy beside it, the logits behind the prompt [vocab_size]
float32.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

# start(prompt [context] int64) -> logits [vocab_size], advance; advance(steps) -> the first token and those of `steps`
# greedy steps
Start = Callable[[np.ndarray], tuple[np.ndarray, Callable[[int], list[int]]]]


def main(
    packages: Sequence[str], export: Callable[[dict], None] | None = None, decode: Callable[[dict], Start] | None = None
) -> None:
    """Do what the command line asks for."""
    what, job = sys.argv[1], json.loads(sys.argv[2])
    result: dict[str, Any] = {"versions": {name: metadata.version(name) for name in sorted(packages)}}
    if what == "export":
        export(job)
    else:
        result |= _timed(decode, job)
    Path(job["result"]).write_text(json.dumps(result))


def greedy(logits: np.ndarray, step: Callable[[int], np.ndarray]) -> Callable[[int], list[int]]:
    """`advance` of a contestant whose `step` takes a token to the next logits."""

    def advance(steps: int) -> list[int]:
        tokens = [int(logits.argmax())]
        for _ in range(steps):
            tokens.append(int(step(tokens[-1]).argmax()))
        return tokens

    return advance


def _timed(decode: Callable[[dict], Start], job: dict) -> dict[str, Any]:
    vocabulary = json.loads((Path(job["checkpoint"]) / "config.json").read_text())["vocab_size"]
    prompt = np.random.default_rng(job["seed"]).integers(3, vocabulary, job["context"])
    began = time.perf_counter()
    start = decode(job)
    opened = time.perf_counter() - began
    seconds = []
    for repeat in range(job["repeats"] + 1):  # the first does not count
        logits, advance = start(prompt)
        if not repeat:
            np.save(Path(job["result"]).with_suffix(".npy"), np.asarray(logits, np.float32))
        began = time.perf_counter()
        tokens = advance(job["steps"])
        if repeat:
            seconds.append((time.perf_counter() - began) / job["steps"])
    return {"open_seconds": opened, "seconds_per_step": seconds, "tokens": tokens}
