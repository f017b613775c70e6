"""This project: resolve, convert, export and build, as the workflow runs them, and its runner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from side import Start, greedy, main

from lockstep.targets import Results

_NAME, _PRECISION, _BACKEND = "model", "fp32", "onnxruntime"


def export(job: dict) -> None:
    from lockstep.backends import build
    from lockstep.checkpoint import resolve, resolve_architecture
    from lockstep.export import run as split
    from lockstep.weights import convert

    results, folder = Results(Path(job["out"])), Path(job["checkpoint"])
    assembly = results.assembly(_NAME, _PRECISION)
    resolve_architecture(str(folder), folder, results.architecture(_NAME))
    resolve(str(folder), folder, results.checkpoint(_NAME))
    convert(results.checkpoint(_NAME), _PRECISION, results.weights(_NAME, _PRECISION))
    split(results.architecture(_NAME), _PRECISION, assembly)
    build(assembly, _BACKEND, results.engines(_NAME, _PRECISION, _BACKEND))


def decode(job: dict) -> Start:
    from lockstep.runtime import Advance, Model

    results = Results(Path(job["out"]))
    model = Model.open(
        results.engines(_NAME, _PRECISION, _BACKEND),
        results.assembly(_NAME, _PRECISION),
        results.weights(_NAME, _PRECISION),
        "all",
        max_batch_size=1,
        max_seq_len=job["context"] + job["steps"] + 1,
        threads=job["threads"],
    )

    def start(prompt: np.ndarray):
        length = len(prompt)
        logits = model.step([Advance(0, prompt, 0)])[0].copy()

        def step(token: int) -> np.ndarray:
            nonlocal length
            result = model.step([Advance(0, np.array([token]), length)])[0]
            length += 1
            return result

        return logits, greedy(logits, step)

    return start


if __name__ == "__main__":
    main(("onnx", "onnxruntime", "onnxscript", "torch", "transformers"), export, decode)
