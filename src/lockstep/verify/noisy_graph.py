"""The noise of a precision in a graph's outputs: how far rounding moves them on these inputs.

A graph, its weights and inputs in; the noise of each row of each output, in units of fp16, out. It is measured in bf16,
whose range is float32's. So an engine's bound follows from the sensitivity of the very numbers that it computes: rows
with outliers, sharp attention, large weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

import numpy as np
import onnx
import onnxruntime as ort

from lockstep.onnx_tools.judge import Bound, Spread, relative_errors, within
from lockstep.onnx_tools.rounded import UNITS, exact_and_rounded
from lockstep.onnx_tools.sessions import open_session
from lockstep.tolerances import ENOUGH, TAIL, Tolerances

_NARROW = ("float16", "bfloat16")
Arrays = Mapping[str, np.ndarray]


class NoisyGraph:
    """A graph in float32, exact and rounded.

    slots: its weight inputs. expose: adds outputs to the graphs. Sessions are opened on first use.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        slots: Collection[str],
        threads: int | None = None,
        expose: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
    ):
        self._model = model
        self._slots = slots
        self._threads = threads
        self._expose = expose

    @functools.cached_property
    def _sessions(self) -> tuple[ort.InferenceSession | None, ort.InferenceSession]:
        """Return the sessions of the exact graph (None: the graph itself is exact) and of the rounded one."""
        exact, rounded = exact_and_rounded(self._model, self._slots)
        if exact is self._model:
            return None, self._open(rounded)
        return self._open(exact), self._open(rounded)

    def _open(self, model: onnx.ModelProto) -> ort.InferenceSession:
        if self._expose is not None:
            model = self._expose(model)
        return open_session(model.SerializeToString(), self._threads)

    def noise(self, feeds: Arrays, outputs: Arrays) -> dict[str, Spread]:
        """Return the noise of each row of each output. feeds: inputs and weights. outputs: the graph's for these."""
        exact, rounded = self._sessions
        wide = dict(feeds)
        for name, array in feeds.items():
            if array.dtype in _NARROW:
                wide[name] = array.astype(np.float32)
        names = outputs.keys()
        if exact is not None:
            outputs = _run(exact, wide)
        return {name: row_noise(outputs[name], array) for name, array in _run(rounded, wide).items() if name in names}


def tolerances_of(model: onnx.ModelProto, tolerances: Tolerances) -> Tolerances:
    """Return the tolerances of the engine of a graph of blocks: others where weights of experts are multiplied."""
    operators = {node.op_type for node in model.graph.node}
    # Each token gathers the weights of its experts, and multiplies them. An embedding only gathers; other quantised
    # products are MatMulNBits.
    if {"GatherBlockQuantized", "MatMul"} <= operators:
        return tolerances.of_experts
    return tolerances


def beside_graph(tolerances: Tolerances, noise: Spread, enough: int = ENOUGH) -> Bound:
    """Return the bound of an engine's output with this noise; below `enough` rows their rms is not bounded."""
    bound = within(tolerances, noise, tolerances.engine)
    if len(noise.rms) < enough:
        return Bound(bound.largest, noise=bound.noise)
    return bound


def row_noise(exact: np.ndarray, rounded: np.ndarray) -> Spread:
    """Return the noise of each row: its own, or the largest row's, up to `TAIL` times the usual row's.

    One way of rounding leaves a row undisturbed that another disturbs. Masked scores, which are infinite, have none.
    """
    finite = np.isfinite(exact) & np.isfinite(rounded)
    exact, rounded = (np.where(finite, array, 0) for array in (exact, rounded))
    relative = relative_errors(exact, rounded) / UNITS
    if not relative.size:
        return Spread(np.zeros(len(exact)), np.zeros(len(exact)))
    return Spread(_lifted(relative.max(1)), _lifted(np.sqrt(np.mean(relative * relative, axis=1))))


def _lifted(rows: np.ndarray) -> np.ndarray:
    return np.maximum(rows, np.minimum(rows.max(), TAIL * np.median(rows)))


def _run(session: ort.InferenceSession, feeds: Arrays) -> dict[str, np.ndarray]:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()})))
