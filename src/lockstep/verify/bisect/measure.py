"""Measure how far an output of a stage is from what is expected of it."""

from __future__ import annotations

import numpy as np

from lockstep.artifacts.bisect_report import MeasuredOutput
from lockstep.errors import CheckError
from lockstep.onnx_tools.metrics import difference, error_scale
from lockstep.targets import Tolerances
from lockstep.verify.metrics import finite
from lockstep.verify.noise import block_bound, row_scale, spread
from lockstep.verify.walk import Stage


def measure(
    stage: Stage,
    tensor: str,
    against: str,
    expected: np.ndarray,
    found: np.ndarray,
    tolerance: Tolerances,
    noisy: np.ndarray | None = None,
) -> MeasuredOutput:
    """Compare an output with what is expected of it.

    Logits absolutely where tolerance.logits is a number. All else relative to the size of the values: as
    `validate` does where there is `noisy`, what fp16 gives in place of `expected`; else as `compare` does.

    Raises CheckError for an output of another shape.
    """
    if expected.shape != found.shape:
        raise CheckError(
            f"{stage.part} ({stage.graph}) of layer {stage.layer}: {tensor}: expected shape {list(expected.shape)}, "
            f"found {list(found.shape)}; export and build again"
        )
    error = difference(expected, found)
    exact, other = (np.asarray(array, np.float64).reshape(len(array), -1) for array in (expected, found))
    if tensor == "logits" and tolerance.logits is not None:
        bound, unit = tolerance.logits, np.ones(1)
        passed = error.within(bound)
    elif noisy is not None:
        allowed = block_bound(spread(expected, noisy), tolerance)
        bound, unit, passed = allowed.largest, row_scale(exact), spread(expected, found).within(allowed)
    else:
        bound, unit = tolerance.beside_graph, error_scale(exact)
        passed = error.within_scaled(bound)
    with np.errstate(invalid="ignore", divide="ignore"):
        rows = np.nan_to_num((np.abs(exact - other) / unit).max(-1), nan=np.inf)
    over = np.flatnonzero(rows > bound)
    position = int(stage.positions[over[0] if len(over) else rows.argmax()])
    errors = finite(error.max_abs_error), finite(error.relative_error)
    return MeasuredOutput(*stage.name, tensor, against, *errors, bound, passed, position)
