"""Sampling: greedy, temperature, top-k and top-p; seeded; and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep.errors import CheckError, InputError
from lockstep.runtime.sampling import Sampler, Sampling, greedy, probabilities

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], np.float32))
any_logits = arrays(np.float32, st.integers(1, 40), elements=st.floats(-100, 100, width=32))


def draw(sampling, count, logits=LOGITS, index=0):
    sampler = Sampler(sampling, index)
    return [sampler(logits) for _ in range(count)]


def test_greedy_takes_the_largest_and_the_lowest_of_equals():
    assert greedy(np.array([1, 3, 3, 2], np.float32)) == 1
    assert draw(Sampling(), 5) == [1] * 5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    with pytest.raises(CheckError, match=f"expected finite numbers, found {bad} for token 2"):
        Sampler(Sampling(temperature=temperature))(np.array([1, 2, bad, 0], np.float32))


def test_frequencies_are_the_probabilities():
    count = 20_000
    found = np.bincount(draw(Sampling(temperature=1.0), count), minlength=5) / count
    # five standard deviations of a frequency near 0.4 over 20,000 draws: 5 * sqrt(0.4 * 0.6 / 20000) = 0.017
    np.testing.assert_allclose(found, np.exp(LOGITS), atol=0.017)


def test_temperature_sharpens_and_flattens():
    hot, cold = (probabilities(LOGITS, Sampling(temperature=t)) for t in (100.0, 0.01))
    np.testing.assert_allclose(hot, 0.2, atol=0.01)  # exp(log 8 / 100) is 2 % from flat
    np.testing.assert_allclose(cold, np.eye(5)[1], atol=1e-12)
    assert np.isfinite(probabilities(LOGITS, Sampling(temperature=1e-300))).all()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=3), {1, 3, 2}),
        (Sampling(1.0, top_k=99), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_p=0.39), {1}),
        (Sampling(1.0, top_p=0.6), {1, 3}),  # 0.4 + 0.25 reaches it
        (Sampling(1.0, top_p=0.7), {1, 3, 2}),
        (Sampling(1.0, top_k=2, top_p=0.6), {1}),  # of the two that top-k leaves, the first has 0.4 / 0.65 = 0.62
        (Sampling(1.0, top_p=1e-9), {1}),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(sampling, kept):
    assert set(np.flatnonzero(probabilities(LOGITS, sampling))) == kept
    assert set(draw(sampling, 300)) <= kept


def test_top_k_keeps_no_more_among_equals():
    assert np.flatnonzero(probabilities(np.zeros(6, np.float32), Sampling(1.0, top_k=2))).tolist() == [0, 1]


def test_the_same_seed_draws_the_same_and_each_request_its_own():
    sampling = Sampling(1.0, seed=7)
    assert draw(sampling, 50) == draw(sampling, 50)
    assert draw(sampling, 50) != draw(sampling, 50, index=1)
    assert draw(sampling, 50) != draw(Sampling(1.0, seed=8), 50)


@settings(deadline=None)
@given(any_logits, st.floats(1e-3, 1e3), st.integers(0, 50), st.floats(1e-6, 1.0))
def test_any_logits_give_probabilities_and_a_token_among_them(logits, temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    found = probabilities(logits, sampling)
    assert found.dtype == np.float64 and (found >= 0).all()
    assert abs(found.sum() - 1) < 1e-12  # float64 rounding of 40 terms
    assert found[np.argmax(logits)] > 0
    assert top_k == 0 or np.count_nonzero(found) <= top_k
    assert found[Sampler(sampling)(logits)] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected 0 or more, found -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k: expected 0"),
        ({"top_p": 0.0}, "top_p: expected above 0 and up to 1, found 0.0"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Sampling(**arguments)
