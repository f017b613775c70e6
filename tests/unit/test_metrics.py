"""How far two arrays are apart: what gates of rewritten graphs compare."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.onnx_tools.metrics import difference, error_scale, max_abs_error, peak

EXPECTED = np.array([[0.5, -3.0], [2.0, 0.0]], np.float32)


def test_the_largest_error_is_computed_in_the_common_dtype() -> None:
    found = EXPECTED + np.array([[1e-7, 0.25], [0, -0.125]], np.float32)
    assert max_abs_error(EXPECTED, found) == 0.25 == difference(EXPECTED, found).max_abs_error
    one, other = np.array([1.0], np.float32), np.array([1e-9], np.float32)
    assert max_abs_error(one, other) == float(one[0] - other[0]) == 1.0
    assert max_abs_error(one.astype(np.float64), other) == 1.0 - float(other[0]) < 1.0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_infinitely_far(wrong: float) -> None:
    found = EXPECTED.copy()
    found[1, 1] = wrong
    assert max_abs_error(EXPECTED, found) == max_abs_error(found, EXPECTED) == max_abs_error(found, found) == np.inf


def test_nothing_is_broadcast() -> None:
    for compare in (max_abs_error, difference):
        with pytest.raises(ValueError, match="expected shape"):
            compare(EXPECTED, EXPECTED[0])


def test_errors_are_relative_to_one_at_least() -> None:
    assert (peak(EXPECTED), peak(EXPECTED / 100), peak(EXPECTED[:0])) == (3.0, 1.0, 1.0)
    assert max_abs_error(EXPECTED[:0], EXPECTED[:0]) == 0
    values = np.array([0.0, 0.1, 20.0])
    rms = np.sqrt((values * values).mean())
    assert error_scale(values).tolist() == [rms, rms, 20.0] and (error_scale(values / 100) == 1).all()
