"""Run a graph in ONNX Runtime, exactly and rounded.

In: a graph, its weights and inputs. Out: outputs, and the noise of each of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx

from lockstep.onnx_tools.judge import Bound, Spread
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened
from lockstep.tolerances import ENOUGH, Tolerances
from lockstep.verify.noisy_graph import NoisyGraph, beside_graph
from lockstep.verify.routing.choices import Choice, with_choices

_NOISE = "noise of "
Arrays = Mapping[str, np.ndarray]


class NoisyRun:
    """Called with inputs, it returns outputs and `noise of <output>` [rows, (largest, rms)] in units of fp16.

    A graph of bf16 is computed in float32, on inputs and weights of bf16. Where a graph has a router, its scores are
    outputs too.
    """

    def __init__(self, model: onnx.ModelProto, weights: Arrays, threads: int | None):
        computed = widened(model)
        self._is_bf16 = computed is not model
        self._weights = {name: self._computed(array) for name, array in weights.items()}
        exposed, self._choices = with_choices(computed)
        self._session = open_session(exposed.SerializeToString(), threads)
        self._noisy = NoisyGraph(model, weights.keys(), threads, lambda graph: with_choices(graph)[0])

    def __call__(self, feed: Arrays) -> dict[str, np.ndarray]:
        feeds = {name: self._rounded(array) for name, array in feed.items()} | self._weights
        names = [value.name for value in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(names, feeds)))
        noise = self._noisy.noise(feeds, outputs)
        return outputs | {f"{_NOISE}{name}": np.stack([rows.largest, rows.rms], axis=1) for name, rows in noise.items()}

    def clear_rows(self, outputs: Arrays, tolerances: Tolerances) -> np.ndarray | None:
        """Return the rows whose choices rounding cannot change; None where a graph has none.

        outputs: of a call. An engine that rounds elsewhere may choose other experts for the rest, and is right.
        """
        rows = [
            is_clear(choice, outputs[choice.scores], bound_of(outputs, choice.scores, tolerances).largest)
            for choice in self._choices
        ]
        if not rows:
            return None
        return np.all(rows, axis=0)

    def _computed(self, array: np.ndarray) -> np.ndarray:
        if array.dtype == ml_dtypes.bfloat16:
            return array.astype(np.float32)
        return array

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        if self._is_bf16 and array.dtype == np.float32:
            return array.astype(ml_dtypes.bfloat16).astype(np.float32)
        return array


def bound_of(
    outputs: Arrays, name: str, tolerances: Tolerances, rows: np.ndarray | slice = slice(None), enough: int = ENOUGH
) -> Bound:
    """Return the largest errors allowed of an output, or of some of its rows. enough: rows whose rms is bounded."""
    largest, rms = outputs[f"{_NOISE}{name}"][rows].T
    return beside_graph(tolerances, Spread(largest, rms), enough)


def is_clear(choice: Choice, scores: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return which rows' choices have a margin above a bound, bool [rows].

    bound: [rows], relative to the largest score that is chosen, or that is compared with a limit.
    """
    counted = np.isfinite(scores)
    if choice.count:
        counted = choice.chosen(scores)
    size = np.abs(np.where(counted, scores, 0)).max(axis=1)
    return ~(choice.margins(scores) <= bound * size)
