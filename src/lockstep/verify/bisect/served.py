"""Measure the logits of a request as the runtime gives them.

An engine set and tokens in, how far the logits behind each step are off out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.bisect_report import StepsError
from lockstep.runtime import Model
from lockstep.targets import Tolerances
from lockstep.verify.golden.forced import Errors, Forced, force
from lockstep.verify.metrics import finite
from lockstep.verify.noise import LogitBounds, LogitNoise
from lockstep.verify.walk import Tokens


def served_error(
    engines_json: Path,
    assembly_json: Path,
    weights_json: Path,
    layers: int | str,
    tokens: Tokens,
    expected: np.ndarray,
    tolerance: Tolerances,
    threads: int | None = None,
) -> StepsError:
    """Step through the tokens, and compare each step's logits. expected: [num_tokens, vocab_size]."""
    files, total = (engines_json, assembly_json, weights_json), len(tokens.ids)
    model = Model.open(*files, layers, max_batch_size=1, max_seq_len=total, threads=threads, low_memory=True)
    ends = tuple(range(tokens.num_prompt, total + 1))
    rows = {count: expected[count - 1] for count in ends}
    request = Forced("", tokens.ids, rows, _bounds(rows, tolerance), ends)
    (errors,) = force(model, [request], model.max_num_tokens or total)
    return _steps_error(errors)


def compare_steps(
    expected: Mapping[int, np.ndarray], found: Mapping[int, np.ndarray], tolerance: Tolerances
) -> StepsError:
    errors = Errors(_bounds(expected, tolerance))
    for count, row in expected.items():
        errors.add(count, row, found[count])
    return _steps_error(errors)


def _bounds(expected: Mapping[int, np.ndarray], tolerance: Tolerances) -> LogitBounds:
    bound = tolerance.logits
    if bound is None:  # nothing was measured of this request: as of an engine beside its graph
        bound = tolerance.beside_graph * max(float(np.abs(row).max()) for row in expected.values())
    return LogitBounds(LogitNoise({}), replace(tolerance, logits=bound))


def _steps_error(errors: Errors) -> StepsError:
    count = errors.first[0] if errors.first else errors.worst_count
    return StepsError(finite(errors.worst), errors.bounds.largest, errors.first is None, count - 1)
