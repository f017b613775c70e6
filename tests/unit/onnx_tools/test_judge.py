"""How far two arrays are apart, and what passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.reports import TensorError
from lockstep.onnx_tools.judge import (
    Bound,
    Spread,
    beside_noise,
    max_abs_error,
    measure,
    peak,
    row_scale,
    spread,
    within,
    wrong,
)
from lockstep.tolerances import ENGINE, ENOUGH, FEW_ROWS, NOISE, ROUNDING, Tolerances
from lockstep.verify.validate.parity import embedding_error

EXPECTED = np.array([[0.5, -3.0], [2.0, 0.0]], np.float32)
ANY = Bound(1e30)


def test_the_largest_error_is_computed_in_the_common_dtype() -> None:
    actual = EXPECTED + np.array([[1e-7, 0.25], [0, -0.125]], np.float32)
    assert max_abs_error(EXPECTED, actual) == 0.25 == measure(EXPECTED, actual, ANY).max_abs_error
    array = np.array([1.0], np.float32)
    other = np.array([1e-9], np.float32)
    assert max_abs_error(array, other) == float(array[0] - other[0]) == 1.0
    assert max_abs_error(array.astype(np.float64), other) == 1.0 - float(other[0]) < 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_infinitely_far_and_passes_no_bound(bad: float) -> None:
    actual = EXPECTED.copy()
    actual[1, 1] = bad
    assert max_abs_error(EXPECTED, actual) == max_abs_error(actual, EXPECTED) == max_abs_error(actual, actual) == np.inf
    error = measure(EXPECTED, actual, ANY)
    assert error.max_abs_error is None and "found NaN" in (wrong("key", error) or "")


def test_nothing_is_broadcast() -> None:
    for compare in (max_abs_error, lambda *pair: measure(*pair, ANY)):
        with pytest.raises(ValueError, match="expected shape"):
            compare(EXPECTED, EXPECTED[0])


def test_nothing_is_no_error() -> None:
    for empty in (EXPECTED[:0], np.zeros((0, 128)), np.zeros((3, 0))):
        error = measure(empty, empty, Bound(0.0, 0.0))
        assert wrong("key", error) is None and max_abs_error(empty, empty) == 0
        assert spread(empty, empty) == Spread(0.0, 0.0)


def test_a_number_is_off_relative_to_the_row_that_it_stands_in() -> None:
    """The row of a massive activation lends its size to no other."""
    expected = np.array([[1000.0, 1.0], [0.001, 0.001]])
    assert spread(expected, expected + [[0, 0], [1e-4, 0]]).largest == pytest.approx(0.1)
    assert spread(expected, expected + [[1.0, 0], [0, 0]]).largest == pytest.approx(1e-3)
    assert row_scale(np.zeros((1, 2))).tolist() == [[1.0, 1.0]]


def test_a_rewritten_graph_is_off_relative_to_one_at_least() -> None:
    assert (peak(EXPECTED), peak(EXPECTED / 100), peak(EXPECTED[:0])) == (3.0, 1.0, 1.0)
    assert measure(EXPECTED, EXPECTED + 0.3, ANY, peak(EXPECTED)).relative_error == pytest.approx(0.1)


def test_an_error_everywhere_is_held_to_less_than_one_number() -> None:
    expected = np.ones((1000, 10))
    bound = within(Tolerances("fp16"), Spread(0.01, 0.002))
    assert (bound.largest, bound.rms) == (NOISE * 0.01, pytest.approx(NOISE / 3 * 0.002))
    array = np.zeros((1000, 10))
    all_of_them = np.full((1000, 10), 0.005)
    array[5, 5] = 0.05
    assert wrong("key", measure(expected, expected + array, bound)) is None
    assert "an error of at most" in (wrong("key", measure(expected, expected + 2 * array, bound)) or "")
    assert "an rms error of at most" in (wrong("key", measure(expected, expected + all_of_them, bound)) or "")


def test_the_rms_of_few_rows_may_be_more_as_it_depends_on_single_roundings() -> None:
    noise = Spread(0.01, 0.002)

    def passes(rows: int, rms_error: float) -> bool:
        expected = np.ones((rows, 10))
        bound = beside_noise(Tolerances("fp16"), noise, rows)
        return wrong("key", measure(expected, expected + rms_error, bound)) is None

    bound = NOISE / 3 * noise.rms
    assert passes(1, 1.1 * bound) and passes(ENOUGH, 0.9 * bound)
    assert not passes(ENOUGH, 1.1 * bound)
    assert not passes(1, 1.1 * FEW_ROWS * bound)


def test_bounds_are_of_a_precision_and_a_backend() -> None:
    assert Tolerances("fp32", "onnxruntime").engine < Tolerances("fp32", "tensorrt").engine
    assert Tolerances("w8a16", "cuda").rounding == Tolerances("fp16").rounding
    assert Tolerances("w8a16").rounding == Tolerances("fp32").rounding, "graphs of it compute in float32"
    assert Tolerances("w8a16", "onnxruntime").of_attention.engine == Tolerances("fp32", "onnxruntime").engine
    assert Tolerances("w8a16", "cuda").of_attention.engine == Tolerances("fp16").engine
    assert set(ENGINE) == set(ROUNDING)


def test_a_wrong_row_of_an_embedding_is_seen_wherever_it_stands() -> None:
    """One of 5,000 tokens, neither the first of a piece nor in the first."""
    table = np.random.default_rng(0).standard_normal((5000, 4)).astype(np.float32)
    wrong_table = table.copy()
    wrong_table[4999] = -table[4999]
    tolerances = Tolerances("fp32", "onnxruntime")

    def error(used: np.ndarray) -> TensorError:
        graphs: Any = SimpleNamespace(
            assembly=SimpleNamespace(vocab_size=len(table)),
            embedding=None,
            run_block=lambda _, inputs: {"hidden": used[inputs["token_ids"]]},
        )
        return embedding_error(graphs, table.__getitem__, table.__getitem__, tolerances)

    assert wrong("hidden", error(table)) is None
    assert wrong("hidden", error(wrong_table)) is not None
