"""Greedy decoding of a graph that takes its past as inputs, in ONNX Runtime.

Graphs of this kind are what optimum and torch.onnx.export make.

Each step's `present.*` outputs become the next step's `past_key_values.*` inputs as they are, without a copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from side import Start, greedy


def decode(job: dict) -> Start:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = job["threads"]
    session = ort.InferenceSession(str(Path(job["out"]) / "model.onnx"), settings, providers=["CPUExecutionProvider"])
    inputs = {value.name: value for value in session.get_inputs()}
    past = [name for name in inputs if name.startswith("past_key_values.")]
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in past)]
    empty = {name: _value(np.zeros((1, inputs[name].shape[1], 0, inputs[name].shape[3]), np.float32)) for name in past}

    def start(prompt: np.ndarray):
        state: dict[str, Any] = {"length": 0, "past": empty}

        def run(tokens: np.ndarray) -> np.ndarray:
            """tokens [n] int64 -> logits [vocab_size] behind the last."""
            end = state["length"] + len(tokens)
            arrays = {
                "input_ids": tokens[None],
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(state["length"], end)[None],
            }
            feeds = {name: _value(array) for name, array in arrays.items() if name in inputs} | state["past"]
            logits, *present = session.run_with_ort_values(outputs, feeds)
            state.update(length=end, past=dict(zip(past, present, strict=True)))
            return logits.numpy()[0, -1]

        logits = run(prompt)
        return logits, greedy(logits, lambda token: run(np.array([token])))

    return start


def _value(array: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array)
