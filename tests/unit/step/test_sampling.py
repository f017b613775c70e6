"""Sampling: greedy, temperature, top-k, top-p, min-p, penalties, lists; seeded without state; rejected parameters."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep.errors import InputError
from lockstep.step.logits_pipeline import Row, Sampler, choose
from lockstep.step.noise import Draw, exponential_noise
from lockstep.step.sampling import Sampling
from next_token_cases import noise_of, probabilities
from some import some

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], np.float32))
any_logits = arrays(np.float32, st.integers(1, 40), elements=st.floats(-100, 100, width=32))


def draw(sampling, count, logits=LOGITS, **of):
    sampler = Sampler(sampling, **of)
    return [sampler(logits, position).token for position in range(count)]


def test_greedy_takes_the_largest_and_the_lowest_of_equals():
    assert Sampler()(np.array([1, 3, 3, 2], np.float32), 0).token == 1
    assert draw(Sampling(), 5) == [1] * 5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(presence_penalty=1.0)])
def test_logits_that_are_not_finite_give_no_token(bad, sampling):
    assert Sampler(sampling)(np.array([1, 2, bad, 0], np.float32), 0).token == -1


def test_frequencies_are_the_probabilities():
    count = 20_000
    actual = np.bincount(draw(Sampling(temperature=1.0), count), minlength=5) / count
    # five standard deviations of a frequency near 0.4 over 20,000 draws: 5 * sqrt(0.4 * 0.6 / 20000) = 0.017
    np.testing.assert_allclose(actual, np.exp(LOGITS), atol=0.017)


def test_noise_is_exponential_in_the_tails_too():
    noise = np.concatenate([noise_of(3, 0, position, 100_003) for position in range(40)])
    assert (noise > 0).all()
    for below in (1e-5, 1e-3, 0.1, 1.0, 5.0):  # of n draws n (1 - exp(-below)), within five standard deviations
        expected = len(noise) * -np.expm1(-below)
        assert abs((noise < below).sum() - expected) < 5 * expected**0.5, below


def test_noise_is_the_published_generator():
    """Philox4x64-10 by its definition (Salmon et al. 2011), in Python integers."""

    def philox(counter, key):
        counter = list(counter)
        key = list(key)
        mask = 2**64 - 1
        for round_ in range(10):
            if round_:
                key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
            a = 0xD2E7470EE14C6C93 * counter[0]
            b = 0xCA5A826395121157 * counter[2]
            counter = [(b >> 64) ^ counter[1] ^ key[0], b & mask, (a >> 64) ^ counter[3] ^ key[1], a & mask]
        return counter

    seed = 2**63 + 5
    choice = 2
    position = 700
    halves = []
    for block in (1, 2, 3):
        for word in philox((block, position, 0, 0), (seed, choice)):
            halves += [word & 0xFFFFFFFF, word >> 32]
    expected = -np.log1p(-(np.array(halves[:21], np.float64) + 0.5) / 2**32)
    np.testing.assert_allclose(noise_of(seed, choice, position, 21), expected, rtol=1e-5)


def test_temperature_sharpens_and_flattens():
    hot, cold = (probabilities(LOGITS, Sampling(temperature=t)) for t in (100.0, 0.01))
    np.testing.assert_allclose(hot / hot.sum(), 0.2, atol=0.01)  # exp(log 8 / 100) is 2 % from flat
    np.testing.assert_allclose(cold, np.eye(5)[1], atol=1e-12)
    assert np.isfinite(probabilities(LOGITS, Sampling(temperature=1e-300))).all()


@pytest.mark.parametrize(
    ("sampling", "token_ids"),
    [
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=3), {1, 3, 2}),
        (Sampling(1.0, top_p=0.39), {1}),
        (Sampling(1.0, top_p=0.6), {1, 3}),  # 0.4 + 0.25 reaches it
        (Sampling(1.0, top_p=0.7), {1, 3, 2}),
        (Sampling(1.0, top_k=2, top_p=0.6), {1}),  # of the two that top-k leaves, the first has 0.4 / 0.65 = 0.62
        (Sampling(1.0, top_p=1e-9), {1}),
        (Sampling(1.0, min_p=0.49), {1, 3, 2}),  # 0.2 of 0.4 is 0.5
        (Sampling(1.0, min_p=1.0), {1}),
    ],
)
def test_top_k_top_p_and_min_p_keep_the_likeliest(sampling, token_ids):
    assert set(np.flatnonzero(probabilities(LOGITS, sampling)).tolist()) == token_ids
    assert set(draw(sampling, 300)) == token_ids


def test_of_equals_at_the_edge_the_lower_ids_stay():
    assert np.flatnonzero(probabilities(np.zeros(6, np.float32), Sampling(1.0, top_k=2))).tolist() == [0, 1]
    assert np.flatnonzero(probabilities(np.zeros(6, np.float32), Sampling(1.0, top_p=0.5))).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [100, 5000, 32_000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_nucleus_is_that_of_a_whole_sort(size, spread):
    logits = (np.random.default_rng(size).standard_normal(size) * spread).astype(np.float32)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        weights = np.exp(logits - logits.max())
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order], dtype=np.float64) - weights[order]
        expected = set(order[before < top_p * weights.sum(dtype=np.float64)].tolist())
        actual = set(np.flatnonzero(probabilities(logits, Sampling(1.0, top_p=top_p))).tolist())
        # one token at the edge is a matter of the last bit of a sum
        assert len(actual ^ expected) <= 1 and actual >= {order[0]}


def test_a_draw_depends_on_seed_choice_and_position_alone():
    sampling = Sampling(1.0, seed=7)
    tokens = draw(sampling, 50)
    assert tokens == draw(sampling, 50)
    assert [Sampler(sampling)(LOGITS, position).token for position in reversed(range(50))] == tokens[::-1]
    assert tokens != draw(sampling, 50, choice=1)
    assert tokens != draw(Sampling(1.0, seed=8), 50) != draw(Sampling(1.0, seed=2**64 - 1), 50)


def test_noise_of_few_tokens_is_that_of_all():
    random = np.random.default_rng(1)
    ids_of_draws = [random.choice(5000, count, replace=False) for count in (1, 7, 300)]
    draws = [Draw(2**64 - 1 - n, n, 2**40 + n, 5000, ids) for n, ids in enumerate(ids_of_draws)]
    draws.insert(1, Draw(3, 1, 5, 5000, np.arange(4000)))
    assert [draw.is_sparse for draw in draws] == [True, False, True, True]
    for draw, noise in zip(draws, exponential_noise(draws)):
        np.testing.assert_array_equal(noise, noise_of(*draw[:3], 5000)[draw.token_ids])


# One request after another chose these, before rows were chosen together.
TOKENS = [
    [961, 2740, 2339, 1478, 101, 3, 971, 2567, 2785, 2548, 2552, 1311, 1517, 2901]
    + [1371, 1544, 1125, 2640, 1702, 282, 2351, 1188, 972, 2536, 2321, 314, 1562, 1638],
    [962, 2741, 2340, 1479, 102, 3, 972, 187, 2786, 1708, 906, 593, 2523, 171]
    + [1372, 1545, 1126, 2641, 2022, 228, 2352, 308, 1690, 1753, 873, 2938, 2775, 2216],
]


def test_rows_are_chosen_together_as_each_alone_and_as_ever():
    random = np.random.default_rng(64)
    rules = [
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05, "top_p": 0.95},
        {"top_k": 700, "top_p": 0.9, "repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {3: 4.0}},
        {"bad_words": ((5,), (9, 11)), "min_tokens": 3},
    ]
    together = []
    alone = []
    logits = []
    for number in range(28):
        row = random.standard_normal(3000) * (0.5, 3, 9, 3)[number // 7]
        logits.append(row.astype(np.float16).astype(np.float32))
        sampling = Sampling(
            (0.0, 0.7, 1.0, 4.0)[number // 7], seed=number << 40, **rules[number % 7], logprobs=number % 4
        )
        prompt = random.integers(0, 3000, 50)
        for samplers in (together, alone):
            samplers.append(Sampler(sampling, prompt, frozenset({4}), number % 3, 40))
    for step, tokens in enumerate(TOKENS):
        rows = [Row(sampler, np.roll(row, step), 50 + step) for sampler, row in zip(together, logits)]
        sampled = choose(rows)
        assert [output.token for output in sampled] == tokens
        assert sampled == [sampler(row.logits, row.position) for sampler, row in zip(alone, rows)]


def test_penalties_count_prompt_and_answer_as_vllm_does():
    flat = np.array([1.0, 1.0, -1.0, 1.0], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=2.0), [0, 2])
    assert sampler(flat, 2).token == 1  # the prompt's token 0 has 0.5
    assert sampler(flat, 3).token == 3  # now 1 has, too
    presence = Sampler(Sampling(presence_penalty=0.5), [0])
    assert [presence(flat, i).token for i in range(4)] == [0, 1, 3, 0]  # the prompt does not count
    often = Sampler(Sampling(frequency_penalty=0.5), [0])
    assert [often(np.array([1.2, 1.0], np.float32), i).token for i in range(4)] == [0, 1, 0, 1]


def test_an_answer_that_was_interrupted_counts_as_answer():
    flat = np.array([1.0, 0.9], np.float32)
    sampling = Sampling(presence_penalty=0.5)
    assert Sampler(sampling, [1, 0], num_prompt_tokens=1)(flat, 2).token == 1
    assert Sampler(sampling, [1, 0])(flat, 2).token == 0


def test_lists_move_and_ban_tokens():
    assert draw(Sampling(logit_bias={4: 10.0}), 2) == [4, 4]
    assert draw(Sampling(logit_bias={1: -100.0}), 1) == [3]
    assert draw(Sampling(bad_words=((1,),)), 2) == [3, 3]
    assert draw(Sampling(bad_words=((1, 1),)), 4) == [1, 3, 1, 3]
    assert draw(Sampling(min_tokens=2), 4, stop_ids=frozenset({1})) == [3, 3, 1, 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 3e38])
def test_any_penalty_is_taken_without_a_warning(penalty):
    logits = np.array([0.0, 1.0, -1.0, 20.0], np.float32)
    assert Sampler(Sampling(repetition_penalty=penalty), [0, 1, 2])(logits, 3).token == (1 if penalty < 1 else 3)


_ON_ANY_CPU = """
import numpy as np
from lockstep.step.logits_pipeline import candidates, log_probabilities
from lockstep.step.sampling import Sampling
random = np.random.default_rng(0)
for size in range(2, 202):
    logits = random.normal(0, 3, size).astype(np.float32)
    order = np.argsort(-logits, kind="stable").tolist()
    for count in range(min(size, 20) + 1):
        assert [token for token, _ in log_probabilities(logits, 0, count).top] == order[:count], (size, count)
    kept, _ = candidates(logits, Sampling(temperature=1.0, top_k=size // 2))
    assert set(kept) == set(order[: size // 2] or order), size
"""


@pytest.mark.parametrize("disabled", ["", "X86_V4 X86_V3 AVX512_ICL AVX512_SPR"])
def test_the_likeliest_are_found_on_any_cpu(disabled: str) -> None:
    """NumPy's `partition` without AVX2 leaves the other elements in another order."""
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", _ON_ANY_CPU], check=True, env=environment)


def test_log_probabilities_are_those_of_the_model():
    output = Sampler(Sampling(logprobs=2, logit_bias={4: 10.0}))(LOGITS, 0)
    assert output.token == 4
    np.testing.assert_allclose(output.logprobs.chosen, np.log(0.05), atol=1e-6)
    assert [token for token, _ in output.logprobs.top] == [1, 3]
    np.testing.assert_allclose([value for _, value in output.logprobs.top], np.log([0.4, 0.25]), atol=1e-6)
    assert Sampler(Sampling(logprobs=0))(LOGITS, 0).logprobs.top == ()
    assert len(Sampler(Sampling(logprobs=20))(LOGITS, 0).logprobs.top) == 5


def vllm_probabilities(logits, sampling, prompt, answer, stop_ids=()):
    """What vLLM's documentation says, in its order, in float64: written for this test alone."""
    logits = logits.astype(np.float64)
    for *before, last in sampling.bad_words:
        if answer[len(answer) - len(before) :] == before:
            logits[last] = -np.inf
    if len(answer) < sampling.min_tokens:
        logits[list(stop_ids)] = -np.inf
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in set(prompt) | set(answer):
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token in set(answer):
        logits[token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
    p = np.exp((logits - logits.max()) / sampling.temperature)
    p[p < sampling.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


RULES = [
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 0.5, "min_p": 0.01, "repetition_penalty": 1.7},
    {"top_k": 3, "repetition_penalty": 0.6, "presence_penalty": -1.5, "frequency_penalty": 0.4},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "top_p": 0.95},
    {"logit_bias": {1: 100.0, 2: 99.5, 3: -100.0}, "repetition_penalty": 1.2, "top_p": 0.999},
    {"bad_words": ((4,), (6, 6), (5, 6, 8), (1, 2)), "min_tokens": 9, "top_k": 20},
    {"top_k": 40},
    {"top_k": 41, "top_p": 1e-9},
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", some([0.3, 2.5]))
def test_draws_have_the_distribution_that_vllm_documents(rule, temperature):
    random = np.random.default_rng(len(str(rule)))
    logits = (random.standard_normal(40) * 3).astype(np.float32)
    sampling = Sampling(temperature, seed=2**64 - 3, **rule)
    count = 1500
    prompt = [0, 6, 6, 9, 30]
    answer = [6, 5, 6, 6, 5, 6]
    expected = vllm_probabilities(logits, sampling, prompt, answer, stop_ids=(0, 11))
    actual = np.zeros(40)
    for position in range(count):
        sampler = Sampler(sampling, prompt + answer, frozenset([0, 11]), num_prompt_tokens=len(prompt))
        actual[sampler(logits, position).token] += 1
    assert not actual[expected == 0].any()
    is_likely = expected * count >= 5
    unlikely = ~is_likely & (expected > 0)
    pairs = [
        *zip(actual[is_likely], expected[is_likely] * count),
        (actual[unlikely].sum(), expected[unlikely].sum() * count),
    ]
    chi_square = sum((first - other) ** 2 / other for first, other in pairs if other)
    degrees = len(pairs) - 1
    # mean and variance of chi-square; five standard deviations, and 10 for few degrees, whose tail is longer
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 10


def test_values_at_the_edges_are_those_of_the_likeliest():
    random = np.random.default_rng(5)
    for _ in range(20):
        logits = (random.standard_normal(300) * 4).astype(np.float32)
        likeliest = int(logits.argmax())
        for of in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
            assert draw(Sampling(1.0, **of), 3, logits) == [likeliest] * 3
        assert draw(Sampling(1e-5), 3, logits) == draw(Sampling(1e-300), 3, logits) == [likeliest] * 3
        for top_k in (300, 301, 10**30):
            assert draw(Sampling(1.0, top_k=top_k), 3, logits) == draw(Sampling(1.0), 3, logits)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_what_leaves_nothing_or_overflows_gives_a_token_all_the_same(temperature):
    everything = tuple((token,) for token in range(5))
    for of in (
        {"bad_words": everything},
        {"bad_words": everything[:4], "min_tokens": 2},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 3e38},
        {"logit_bias": dict.fromkeys(range(5), 3.4e38), "repetition_penalty": 0.5},
        {"logit_bias": dict.fromkeys(range(5), -3.4e38), "repetition_penalty": 9.0},
    ):
        sampler = Sampler(Sampling(temperature, **of), range(5), frozenset([4, 5, -1]))
        assert sampler(LOGITS + 3, 0).token in range(5)
    assert draw(Sampling(temperature, bad_words=everything), 3) == draw(Sampling(temperature), 3)


@given(any_logits, st.floats(0.01, 10), st.integers(0, 50), st.floats(0.01, 1), st.floats(0, 1))
def test_the_token_is_one_of_those_that_are_left(logits, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature, top_k, top_p, min_p)
    actual = probabilities(logits, sampling)
    assert np.isfinite(actual).all() and actual.max() > 0
    equal = probabilities(logits, Sampling(temperature)) == 1  # as likely as the likeliest, in float32
    assert actual[logits.argmax()] > 0 or equal.sum() > 1  # of equals the lowest
    if top_k:
        assert (actual > 0).sum() <= top_k
    assert actual[Sampler(sampling)(logits, 3).token] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected 0 or more, found -1.0"),
        ({"temperature": float("nan")}, "temperature: expected 0 or more, found nan"),
        ({"temperature": "hot"}, "temperature: expected a number, found hot"),
        ({"top_k": -1}, "top_k: expected 0 .all. or more, found -1"),
        ({"top_p": 0.0}, "top_p: expected above 0 and up to 1, found 0"),
        ({"min_p": 1.5}, "min_p: expected 0 to 1, found 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected above 0, found 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty: expected -2 to 2, found 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: expected -2 to 2, found nan"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias: expected finite numbers by token id"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias: expected numbers by token id, found {'3': 1.0}"),
        ({"bad_words": ("",)}, "bad_words: expected texts in UTF-8 that are not empty, or sequences .*, found .''"),
        ({"bad_words": ((1.5,),)}, "bad_words: expected texts .*, or sequences of at least one token, found ..1.5"),
        ({"bad_words": ((),)}, "bad_words: expected texts .*, or sequences of at least one token, found ...,."),
        ({"min_tokens": -1}, "min_tokens: expected 0 or more, found -1"),
        ({"seed": 2**64}, r"seed: expected 0 to 2\*\*64-1, found 18446744073709551616"),
        ({"logprobs": 21}, "logprobs: expected 0 to 20, or none, found 21"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Sampling(**arguments)
