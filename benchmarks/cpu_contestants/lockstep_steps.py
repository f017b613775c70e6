"""This project's engines on ONNX Runtime, in any precision."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cpu_contestants.side import Start, main
from benchmarks.decode import decoding, prepare
from lockstep import Results

_BACKEND = "onnxruntime"
_GROUP = 32


def make(job: dict) -> None:
    prepare(Path(job["checkpoint"]), job["precision"], Path(job["out"]), _GROUP, _BACKEND, job["head_bits"])


def opened(job: dict) -> Start:
    results = Results(Path(job["out"]))
    name = Path(job["checkpoint"]).name
    precision = job["precision"]
    paths = {
        "weights": results.weights(name, precision),
        "assembly": results.assembly(name, precision),
        "engines": results.engines(name, precision, _BACKEND),
    }
    begin = decoding(paths, job["batch"], job["capacity"], job["threads"])

    def start(prompts: np.ndarray):
        take, logits = begin(prompts)
        state = {"logits": logits}

        def step() -> None:
            state["logits"] = take(state["logits"].argmax(-1))

        return step

    return start


if __name__ == "__main__":
    main(("onnxruntime", "numpy"), make, opened)
