"""The noise of a precision in what a graph gives: how far rounding moves it on the inputs that it is run on.

A graph, its weights and inputs in; of each row of each output the noise in units of fp16 out. It is measured in bf16,
whose range is float32's. So an engine is compared with the sensitivity of the very numbers that it computes: rows with
outliers, sharp attention, large weights.
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
from lockstep.tolerances import Tolerances

_ENOUGH = 8  # rows whose rms is no single draw of roundings
_TAIL = 3  # times the usual row: see `verify.noise.LogitNoise.at`
_NARROW = ("float16", "bfloat16")
Arrays = Mapping[str, np.ndarray]


class NoisyGraph:
    """A graph in float32, exact and rounded.

    slots: its weight inputs. expose: what gives the graphs more outputs. Sessions are opened when they are needed.
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
        """Return what computes the exact graph (None: the graph itself is exact) and the rounded one."""
        exact, rounded = exact_and_rounded(self._model, self._slots)
        return None if exact is self._model else self._open(exact), self._open(rounded)

    def _open(self, model: onnx.ModelProto) -> ort.InferenceSession:
        exposed = self._expose(model) if self._expose else model
        return open_session(exposed.SerializeToString(), self._threads)

    def noise(self, feeds: Arrays, outputs: Arrays) -> dict[str, Spread]:
        """Return the noise of each row of each output. feeds: inputs and weights. outputs: what the graph gave."""
        exact, rounded = self._sessions
        wide = dict(feeds)
        for name, array in feeds.items():
            if array.dtype in _NARROW:
                wide[name] = array.astype(np.float32)
        right = outputs if exact is None else _run(exact, wide)
        return {name: row_noise(right[name], array) for name, array in _run(rounded, wide).items() if name in outputs}


def beside_graph(tolerances: Tolerances, noise: Spread) -> Bound:
    """Return what may be off of an output with this noise of its rows. Their rms counts where they are enough."""
    bound = within(tolerances, noise, tolerances.engine)
    return bound if len(noise.rms) >= _ENOUGH else Bound(bound.largest, noise=bound.noise)


def row_noise(exact: np.ndarray, rounded: np.ndarray) -> Spread:
    """Return the noise of each row: its own, or what others have where that is larger, to 3 times the usual row.

    A row that one draw of roundings does not disturb another may. Numbers that are not finite, as scores that are
    masked, have none.
    """
    finite = np.isfinite(exact) & np.isfinite(rounded)
    exact, rounded = (np.where(finite, array, 0) for array in (exact, rounded))
    relative = relative_errors(exact, rounded) / UNITS
    if not relative.size:
        return Spread(np.zeros(len(exact)), np.zeros(len(exact)))
    row_values = relative.max(1), np.sqrt(np.mean(relative * relative, axis=1))
    return Spread(*(np.maximum(rows, np.minimum(rows.max(), _TAIL * np.median(rows))) for rows in row_values))


def _run(session: ort.InferenceSession, feeds: Arrays) -> dict[str, np.ndarray]:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()})))
