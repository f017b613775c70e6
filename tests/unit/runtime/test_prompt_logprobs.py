"""Log-probabilities of prompts, and `echo`: what transformers makes of the demo checkpoint, in any company, over HTTP
in one piece and in a stream, and as lm-eval's local-completions asks for and reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import engine_steps
import numpy as np
import pytest
from demo_model import DEMO
from engine_steps import open_model

from lockstep.errors import InputError
from lockstep.runtime import Engine, Model, Request, Sampling, Tokenizer
from lockstep.step.sampling import Logprobs
from lockstep.targets import Results
from real_server import RealServer, make_tree

TEXT = "Once upon a time there was a café – naïve, 日本 – and so on."  # characters of up to three bytes
# fp32 on both sides: sums of some hundred products in another order, and logits up to 20; 2e-5 seen.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def model(demo: Results) -> Model:
    return open_model(demo)


def ids(length: int, seed: int = 0) -> list[int]:
    return engine_steps.ids(length, seed).tolist()


def reference(tokens: list[int]) -> np.ndarray:
    """Log-probabilities [len(tokens) - 1, vocab_size] of what follows each token but the last, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch_model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = torch_model(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits.double(), -1).numpy()


def prompt_logprobs(engine: Engine, *requests: Request) -> tuple[dict[int, list[Logprobs]], dict[int, list[int]]]:
    """By request the log-probabilities of its prompt, and its tokens."""
    results: dict[int, list[Logprobs]] = {}
    tokens: dict[int, list[int]] = {}
    engine.add_all(requests)
    while engine.has_work:
        step = engine.step()
        for number, first, entries in engine.prompt_logprobs:
            assert number not in tokens and first == len(results.setdefault(number, [])) + 1
            results[number] += entries
        for output in step:
            tokens.setdefault(output.request, []).append(output.token)
    engine.scheduler.check()
    return results, tokens


def test_they_are_those_of_transformers(model: Model) -> None:
    prompt = ids(200)
    actual, tokens = prompt_logprobs(Engine(model), Request(prompt, 3, prompt_logprobs=5))
    expected = reference(prompt)
    assert len(actual[0]) == len(prompt) - 1 and len(tokens[0]) == 3
    for entry, row, token in zip(actual[0], expected, prompt[1:], strict=True):
        assert abs(entry.chosen - row[token]) < TOLERANCE
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        np.testing.assert_allclose([value for _, value in entry.top], np.sort(row)[::-1][:5], atol=TOLERANCE)
        assert all(abs(row[number] - value) < TOLERANCE for number, value in entry.top)


def test_company_changes_no_bit_of_them(model: Model) -> None:
    lengths = (1, 2, 9, 64, 65, 100, 129, 200)
    requests = [Request(ids(length, length), 2, prompt_logprobs=3) for length in lengths]
    alone = [prompt_logprobs(Engine(model), request)[0].get(0) for request in requests]
    batch = [Request(ids(length, 1000 + length), 12, sampling=Sampling(1.0, seed=length)) for length in (5, 70, 130)]
    together, _ = prompt_logprobs(Engine(model, max_num_tokens=68), *batch, *requests)
    assert [together.get(len(batch) + number) for number in range(len(requests))] == alone
    assert [len(item or ()) for item in alone] == [length - 1 for length in lengths]


def test_a_prefix_in_the_cache_spares_nothing_and_none_is_left_there(model: Model) -> None:
    engine = Engine(model)
    prompt = ids(150)
    for request in (Request(prompt, 1), Request(prompt, 1, prompt_logprobs=1), Request(prompt, 0, prompt_logprobs=1)):
        cached = model.tables.pool.num_cached
        computed = engine.speed.prefill_tokens
        actual, tokens = prompt_logprobs(engine, request)
        assert engine.speed.prefill_tokens - computed == len(prompt)
        assert (model.tables.pool.num_cached == cached) == (request.prompt_logprobs is not None)
    assert list(tokens.values()) == [[-1]] and len(*actual.values()) == len(prompt) - 1


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=pytest.mark.long)])
def test_given_answers_have_the_bits_that_decoding_gave(model: Model, count: int) -> None:
    """In company while they were sampled; together, in another order and with other cuts, and alone when given."""
    lengths = np.random.default_rng(0).integers(1, 120, count // 100)
    prompts = [ids(length, number) for number, length in enumerate(lengths)]
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(Request(prompt, 100, sampling=Sampling(1.5, seed=number, top_p=0.9, logprobs=number % 3)))
    answers: list[list[int]] = [[] for _ in requests]
    decoded: list[list[Logprobs | None]] = [[] for _ in requests]
    for token in Engine(model).run(requests):
        answers[token.request].append(token.token)
        decoded[token.request].append(token.logprobs)
    assert sum(map(len, answers)) == count
    scored = Engine(model, max_num_tokens=68).score(prompts[::-1], answers[::-1], 2)[::-1]
    for number, (entries, expected) in enumerate(zip(scored, decoded, strict=True)):
        assert [Logprobs(entry.chosen, entry.top[: number % 3]) for entry in entries] == expected
    for number in range(3):
        alone = Engine(model, prefix_caching=False).score([prompts[number]], [answers[number]], 2)
        assert alone == [scored[number]]


def test_a_given_answer_that_cannot_be_is_refused(model: Model) -> None:
    engine = Engine(model)
    with pytest.raises(InputError, match="^prompt 1: forced_ids: expected token ids 0 to 767, found 768$"):
        engine.score([[1, 2]], [[768]])
    with pytest.raises(InputError, match=r"^forced_ids: expected max_new_tokens \(3\) token ids, found 2$"):
        engine.add(Request([1], 3, forced_ids=[1, 2]))
    with pytest.raises(InputError, match="^stop_ids: expected none together with forced_ids"):
        engine.add(Request([1], 1, forced_ids=[1], stop_ids=frozenset([2])))
    with pytest.raises(InputError, match="^prompt 1: max_new_tokens: expected at least 1, found 0$"):
        engine.score([[1]], [[]])


def test_values_that_cannot_be_are_refused(model: Model) -> None:
    with pytest.raises(InputError, match="^prompt_logprobs: expected 0 to 20, found 21$"):
        Engine(model).add(Request([1, 2], 1, prompt_logprobs=21))
    with pytest.raises(InputError, match="^max_new_tokens: expected at least 1, found 0$"):
        Engine(model).add(Request([1, 2], 0))


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    tree = make_tree(tmp_path_factory.mktemp("echo") / "results", demo)
    with RealServer(tree, "--chunk-size", 64) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(demo: Results) -> Tokenizer:
    return Tokenizer.open(demo.assembly("demo-llama", "fp32"))


def streamed(server: RealServer, prompt: Any, max_tokens: int, **options: Any) -> dict[str, Any]:
    """The chunks of a stream's only answer put together."""
    joined: dict[str, Any] = {"text": "", "logprobs": {}, "finish_reason": None}
    with server.opened(prompt, max_tokens, **options) as events:
        for event in events:
            for choice in event["choices"]:
                joined["text"] += choice["text"]
                joined["finish_reason"] = choice["finish_reason"]
                for name, values in choice["logprobs"].items():
                    joined["logprobs"].setdefault(name, []).extend(values)
    assert events.done
    return joined


def test_a_server_gives_the_log_probabilities_of_given_answers(server: RealServer) -> None:
    prompts = [ids(9), ids(70, 1)]
    options: dict[str, Any] = {"logprobs": 2, "return_token_ids": True}
    decoded = server.complete(prompts, 20, seed=7, ignore_eos=True, **options)["choices"]
    answers = [choice["token_ids"] for choice in decoded]
    assert server.complete(prompts, 1, temperature=0.0, forced_token_ids=answers, **options)["choices"] == decoded
    body = {"model": "demo-llama", "prompt": prompts, "forced_token_ids": answers[0]}
    for changed in ({}, {"prompt": prompts[0], "stop": "a"}, {"prompt": prompts[0], "forced_token_ids": [True]}):
        status, _, answer = server.request("POST", "/v1/completions", {**body, **changed})
        assert status == 400 and b"forced_token_ids: expected a list of token ids for each" in answer
    status, _, answer = server.request("POST", "/v1/completions", {**body, "forced_token_ids": [[1], [768]]})
    assert status == 400 and b"forced_token_ids: expected token ids 0 to 767, found 768" in answer


@pytest.mark.parametrize("max_tokens", [0, 1, 20])
def test_echo_gives_the_prompt_first_whole_or_streamed(
    server: RealServer, tokenizer: Tokenizer, max_tokens: int
) -> None:
    prompt = tokenizer.encode(TEXT).tolist()
    answer = server.complete(TEXT, max_tokens, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), max_tokens)
    assert choice["text"].startswith(TEXT) and choice["finish_reason"] == "length"
    if max_tokens:
        assert choice["text"][len(TEXT) :] == server.complete(TEXT, max_tokens)["choices"][0]["text"]
    logprobs = choice["logprobs"]
    assert all(len(values) == len(prompt) + max_tokens for values in logprobs.values())
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    expected = reference(prompt)[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(logprobs["token_logprobs"][1 : len(prompt)], expected, atol=TOLERANCE)
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert 1 <= len(top) <= 3 and token in top  # the two likeliest, and the one that is there
    full = [(token, at) for token, at in zip(logprobs["tokens"], logprobs["text_offset"]) if "\ufffd" not in token]
    assert len(full) > len(prompt) // 2
    assert all(choice["text"][at : at + len(token)] == token for token, at in full)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    chunks = streamed(server, prompt, max_tokens, echo=True, logprobs=2)
    assert {name: choice[name] for name in chunks} == chunks


def test_echo_without_logprobs_and_of_several_answers(server: RealServer) -> None:
    answer = server.complete([TEXT, "The"], 6, echo=True, n=2, temperature=1.0, seed=1)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.startswith(TEXT) for text in texts] == [True, True, False, False]
    assert all(text.startswith("The") for text in texts[2:]) and len(set(texts)) == 4
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert server.complete("The", 0, echo=True)["choices"][0]["text"] == "The"
    with server.opened([TEXT, "The"], 6, echo=True) as events:
        results = {0: "", 1: ""}
        for event in events:
            for choice in event["choices"]:
                results[choice["index"]] += choice["text"]
    assert results[0].startswith(TEXT) and results[1].startswith("The")
    several = server.complete("The cat", 4, echo=True, logprobs=1, n=3, temperature=1.0, seed=2)["choices"]
    single = server.complete("The cat", 0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    count = len(single["tokens"])
    assert all(choice["logprobs"]["token_logprobs"][:count] == single["token_logprobs"] for choice in several)
    status, _, data = server.request("POST", "/v1/completions", {"model": "demo-llama", "prompt": "a", "max_tokens": 0})
    assert status == 400 and json.loads(data)["error"]["param"] == "max_tokens"
    server.wait_idle()


def test_what_lm_eval_asks_for_is_what_it_can_read(server: RealServer, tokenizer: Tokenizer) -> None:
    """As its local-completions sums up a continuation: without the token that had to be made."""
    contexts = ("The little dog", "One day the")
    continuations = (" was happy.", " sun")
    pairs = [(tokenizer.encode(a).tolist(), tokenizer.encode(b).tolist()) for a, b in zip(contexts, continuations)]
    body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    answer = server.post("/v1/completions", model="demo-llama", prompt=[a + b for a, b in pairs], **body)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        part = slice(len(context), -1)
        values = choice["logprobs"]["token_logprobs"][part]
        tops = choice["logprobs"]["top_logprobs"][part]
        rows = reference(context + continuation)[len(context) - 1 :]
        expected = rows[np.arange(len(continuation)), continuation]
        assert abs(sum(values) - expected.sum()) < TOLERANCE * len(continuation)
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops))
        assert is_greedy == (rows.argmax(-1).tolist() == continuation)
    # the same sum where none had to be made, and where a greedy answer is the continuation
    none = server.complete(pairs[0][0] + pairs[0][1], 0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert none["token_logprobs"] == choices[0]["logprobs"]["token_logprobs"][:-1]
    logprobs = server.complete(pairs[0][0], 5, logprobs=1)["choices"][0]["logprobs"]
    assert all(value == max(top.values()) for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"]))
