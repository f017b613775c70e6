"""This project's engines on ONNX Runtime, in any precision."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cpu_contestants.side import Start, main
from benchmarks.engine_sets import make_engines
from lockstep import Advance, Model, ModelOptions, Results

_BACKEND = "onnxruntime"
_GROUP = 32


def make(job: dict) -> None:
    make_engines(Path(job["checkpoint"]), job["precision"], Path(job["out"]), _GROUP, head_bits=job["head_bits"])


def opened(job: dict) -> Start:
    results = Results(Path(job["out"]))
    name = Path(job["checkpoint"]).name
    precision = job["precision"]
    model = Model.open(
        results.engines(name, precision, _BACKEND),
        results.assembly(name, precision),
        results.weights(name, precision),
        options=ModelOptions(max_batch_size=job["batch"], max_seq_len=job["capacity"], threads=job["threads"]),
    )

    def start(prompts: np.ndarray):
        length = prompts.shape[1]
        logits = model.step([Advance(slot, prompt, 0) for slot, prompt in enumerate(prompts)])

        def step() -> None:
            nonlocal length, logits
            tokens = logits.argmax(-1)
            logits = model.step([Advance(slot, [token], length) for slot, token in enumerate(tokens)])
            length += 1

        return step

    return start


if __name__ == "__main__":
    main(("onnxruntime", "numpy"), make, opened)
