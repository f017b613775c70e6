"""Measure the logits of a request as the runtime gives them.

An engine set and tokens in, how far the logits behind each step are off out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.artifacts.bisect_report import StepsError
from lockstep.onnx_tools.metrics import difference
from lockstep.runtime import Advance, Model
from lockstep.targets import Tolerances
from lockstep.verify.bisect.stages import Tokens
from lockstep.verify.metrics import finite, largest


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
    """Bring the prompt, then token by token, and compare each step's logits.

    position: of the first step over tolerance, of the one with the largest error where none is. Weights are read in
    place where the backend can.
    """
    model = Model.open(
        engines_json,
        assembly_json,
        weights_json,
        layers,
        max_batch_size=1,
        max_seq_len=len(tokens.ids),
        threads=threads,
        low_memory=True,
    )
    return compare_steps(steps_of(model, tokens), expected, tokens, tolerance)


def compare_steps(found: np.ndarray, expected: np.ndarray, tokens: Tokens, tolerance: Tolerances) -> StepsError:
    """Compare the logits [steps, vocab_size] behind the prompt and each later token."""
    bound = tolerance.logits
    if bound is None:  # nothing was measured of this request: as of an engine beside its graph
        bound = tolerance.beside_graph * float(np.abs(expected).max())
    errors = [difference(wanted, row).max_abs_error for wanted, row in zip(expected[tokens.num_prompt - 1 :], found)]
    over = [step for step, error in enumerate(errors) if error is None or error > bound]
    step = over[0] if over else int(np.argmax(np.array(errors, np.float64)))  # none is None where none is over
    return StepsError(finite(largest(errors)), bound, not over, tokens.num_prompt - 1 + step)


def steps_of(model: Model, tokens: Tokens) -> np.ndarray:
    """Return the logits [num_tokens - num_prompt + 1, vocab_size] of all steps."""
    piece = model.max_num_tokens or tokens.num_prompt
    starts = [*range(0, tokens.num_prompt, piece)]
    bounds = [(start, min(start + piece, tokens.num_prompt)) for start in starts] + [
        (at, at + 1) for at in range(tokens.num_prompt, len(tokens.ids))
    ]
    rows = [model.step([Advance(0, tokens.ids[start:stop], start)])[0] for start, stop in bounds]
    return np.stack(rows[len(starts) - 1 :])
