"""This project: its stages up to build, as in the workflow, and its runner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from side import Start, greedy, main

import lockstep
from lockstep import Advance, Model, Results

_NAME, _PRECISION, _BACKEND = "model", "fp32", "onnxruntime"


def export(job: dict) -> None:
    results, folder = Results(Path(job["out"])), Path(job["checkpoint"])
    assembly = results.assembly(_NAME, _PRECISION)
    lockstep.resolve_architecture(str(folder), folder, results.architecture(_NAME))
    lockstep.resolve_checkpoint(str(folder), folder, results.checkpoint(_NAME))
    lockstep.convert_weights(results.checkpoint(_NAME), _PRECISION, results.weights(_NAME, _PRECISION))
    lockstep.export_graphs(results.architecture(_NAME), _PRECISION, assembly)
    lockstep.build_engines(assembly, _BACKEND, results.engines(_NAME, _PRECISION, _BACKEND))


def decode(job: dict) -> Start:
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
