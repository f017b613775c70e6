"""The second sampler, by which `served` judges: its noise by published numbers, its choices against the product's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.provenance.code_identity import SOURCES, file_of, imports
from lockstep.step.logits_pipeline import Sampler
from lockstep.step.sampling import Sampling
from lockstep.verify.sampled.noise import exponential_noise, philox
from lockstep.verify.sampled.rules import Rules, choose, noises
from next_token_cases import noise_of

ALONE = ("answer", "judge", "noise", "rules", "texts")
ONES = (1 << 64) - 1


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # from kat_vectors of Random123, the authors' library: philox4x64, 10 rounds
        ([0] * 4, [0] * 2, "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ([ONES] * 4, [ONES] * 2, "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            [0x452821E638D01377, 0xBE5466CF34E90C6C],
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_the_generator_gives_its_authors_numbers(counter: list[int], key: list[int], words: str) -> None:
    actual = philox([np.array([word], np.uint64) for word in counter], (key[0], key[1]))
    assert [f"{int(word[0]):016x}" for word in actual] == words.split()


@pytest.mark.parametrize(
    ("seed", "choice", "position", "count"), [(0, 0, 0, 1), (5, 1, 17, 9), (ONES, ONES, 1 << 40, 1001)]
)
def test_noise_is_that_of_the_product(seed: int, choice: int, position: int, count: int) -> None:
    actual = exponential_noise(seed, choice, [3, position], count)[1]
    # a logarithm in float32: half of its last bit
    np.testing.assert_allclose(actual, noise_of(seed, choice, position, count), rtol=2e-7)


def body(random: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """Return a random body of a request: each field in about half of them."""
    tokens = random.choice(vocab_size, 3, replace=False)
    fields: dict[str, Any] = {
        "temperature": float(random.choice([0.0, 0.3, 1.0, 4.0])),
        "top_k": int(random.integers(0, 2 * vocab_size)),
        "top_p": float(random.uniform(0.05, 1)),
        "min_p": float(random.choice([0.0, 0.1, 0.9])),
        "repetition_penalty": float(random.uniform(0.5, 2)),
        "presence_penalty": float(random.uniform(-2, 2)),
        "frequency_penalty": float(random.uniform(-2, 2)),
        "logit_bias": {str(token): float(random.normal(0, 5)) for token in tokens},
        "min_tokens": int(random.integers(0, 8)),
        "stop_token_ids": [int(tokens[0])],
    }
    return {"seed": int(random.integers(1 << 62)), **{k: v for k, v in fields.items() if random.random() < 0.5}}


def test_it_chooses_what_the_product_chooses() -> None:
    random = np.random.default_rng(0)
    near = 0
    for _ in range(300):
        vocab_size = int(random.choice([2, 5, 40, 300]))
        request_body = body(random, vocab_size) if vocab_size > 2 else {"seed": 3}
        rules = Rules.from_body(request_body, [1])
        bias = {int(token): value for token, value in request_body.get("logit_bias", {}).items()}
        fields = {k: v for k, v in request_body.items() if k not in ("logit_bias", "stop_token_ids")}
        sampling = Sampling(**{"temperature": 1.0, **fields}, logit_bias=bias)
        prompt = random.integers(0, vocab_size, random.integers(1, 6)).tolist()
        choice = int(random.integers(0, 3))
        sampler = Sampler(sampling, prompt, rules.stop_ids, choice)
        answer = []
        steps = noises(rules, prompt, 6, vocab_size, choice)
        for noise in steps:
            row = random.normal(0, random.choice([0.5, 3, 20]), vocab_size).astype(np.float32)
            chosen = choose(rules, row, prompt, answer, noise)
            token = sampler(row, len(prompt) + len(answer)).token
            assert chosen.may_be(token), (request_body, prompt, answer)
            near += token != chosen.token
            answer.append(token)
    assert near < 3  # rounding: none is seen


def test_a_token_is_accepted_within_the_error_of_the_logits_alone() -> None:
    row = np.array([1.0, 1.05, 0.5, -3.0], np.float32)
    greedy = Rules(temperature=0)
    assert choose(greedy, row, [0], []).token == 1
    assert not choose(greedy, row, [0], []).may_be(0)
    assert choose(greedy, row, [0], [], error=0.03).may_be(0)
    assert not choose(greedy, row, [0], [], error=0.03).may_be(2)
    drawn = Rules(temperature=1.0, top_k=2)
    noise = np.array([5.0, 5.0, 0.01, 5.0])  # the third would win, if top-k left it in
    assert choose(drawn, row, [0], [], noise).token == 1
    assert not choose(drawn, row, [0], [], noise, error=0.03).may_be(2)
    assert choose(drawn, row, [0], [], noise, error=0.3).may_be(2)  # it may be the second, and is then drawn


def test_a_large_error_asks_for_no_token_that_is_left_out() -> None:
    """Where an error of the logits explains each order of the first few, each of these is accepted, and no other."""
    row = np.array([1.0, 1.05, 0.5, -30.0], np.float32)
    noise = np.array([5.0, 5.0, 5.0, 1e-9])  # the fourth would win, if it were not left out
    for truncation in ({"top_k": 2}, {"top_p": 0.6}):
        chosen = choose(Rules(temperature=1.0, **truncation), row, [0], [], noise, error=2.0)
        assert chosen.token in (0, 1)
        assert [chosen.may_be(token) for token in range(4)] == [True, True, True, False], truncation


def test_lists_that_leave_no_token_are_ignored() -> None:
    row = np.array([1.0, 2.0], np.float32)
    rules = Rules(temperature=0, min_tokens=1, stop_ids=frozenset({0, 1}))
    assert choose(rules, row, [0], []).token == 1


def test_it_shares_no_code_with_what_it_judges() -> None:
    modules = set()
    for name in ALONE:
        modules.update(imports(SOURCES / "lockstep" / "verify" / "sampled" / f"{name}.py"))
    theirs = {file_of(module) for module in modules} - {None}
    assert {file.relative_to(SOURCES).parts[1] for file in theirs} == {"verify", "tolerances.py"}
    assert {file.name for file in theirs} <= {f"{name}.py" for name in (*ALONE, "text", "tolerances", "__init__")}
