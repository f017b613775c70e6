"""Texts of answers wherever they are given out, with tokenizers of published models and a model that says a script."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scripted_model
from real_tokenizers import SENTENCEPIECE, TEKKEN, tokenizer_json

from lockstep.runtime import Engine, Model, ModelOptions, Request, Sampling, Tokenizer, generate
from lockstep.runtime.batch_file import generate_file
from lockstep.targets import Results
from real_server import RealServer
from shared import Shared

# By day test_real_text.py has the same texts without a server.
pytestmark = [pytest.mark.exports, pytest.mark.long]

PROMPT = "x"
ANSWER = " the 𓀀cat the\n"
BANS_AT = 40  # a prompt of that many tokens is answered with a bad word, in one of its spellings
TEMPLATE = {"chat_template": "{{ messages[0]['content'] }}", "bos_token": "<s>"}


@pytest.fixture(scope="module", params=[SENTENCEPIECE, pytest.param(TEKKEN, marks=pytest.mark.long)])
def results(shared: Shared, request: pytest.FixtureRequest) -> Results:
    path = tokenizer_json(shared, request.param)

    def make(folder: Any) -> None:
        tokenizer = Tokenizer(path)
        ids = answer_ids(tokenizer)
        script: dict[int, Any] = {len(tokenizer.encode(PROMPT)) - 1 + at: token for at, token in enumerate(ids)}
        ways: list[int] = []
        for text in ("true", "rue", "ue", "e"):
            ways += itertools.chain.from_iterable(tokenizer.spellings(text))
        for text in ("t", "tr", "tru", "r", "u", "ru"):
            ways += tokenizer.spellings(text)[-1]
        ways = list(dict.fromkeys(ways))
        script |= dict.fromkeys(range(BANS_AT - 1, BANS_AT + 15), ways)
        checkpoint = scripted_model.write(folder / "checkpoint", path, script, TEMPLATE)
        scripted_model.results(checkpoint, folder / "results")

    return Results(shared.folder(f"scripted-text-{request.param}", make) / "results")


@pytest.fixture(scope="module")
def tokenizer(results: Results) -> Tokenizer:
    return Tokenizer.open(results.assembly("scripted", "fp32"))


@pytest.fixture(scope="module")
def server(results: Results) -> Iterator[RealServer]:
    with RealServer(results.root, target=scripted_model.TARGET) as server:
        yield server


@pytest.fixture(scope="module")
def model(results: Results) -> Model:
    engines = results.engines("scripted", "fp32", "onnxruntime")
    weights = results.weights("scripted", "fp32")
    return Model.open(
        engines, results.assembly("scripted", "fp32"), weights, options=ModelOptions(max_batch_size=2, max_seq_len=100)
    )


def answer_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of ANSWER after a word."""
    ids = tokenizer.encode(f"{PROMPT}{ANSWER}").tolist()
    before = tokenizer.encode(PROMPT).tolist()
    assert ids[: len(before)] == before
    return ids[len(before) :]


def complete(server: RealServer, prompt: Any, max_tokens: int, **body: Any) -> Any:
    return server.complete(prompt, max_tokens, model="scripted", **body)["choices"][0]


def test_openais_completions(server: RealServer, tokenizer: Tokenizer) -> None:
    max_tokens = len(answer_ids(tokenizer))
    ids = tokenizer.encode(PROMPT).tolist()
    for prompt in (PROMPT, ids):
        assert complete(server, prompt, max_tokens)["text"] == ANSWER
        assert complete(server, prompt, max_tokens, echo=True)["text"] == PROMPT + ANSWER
        assert complete(server, prompt, max_tokens, stop=["cat"])["text"] == ANSWER.partition("cat")[0]
        assert complete(server, prompt, max_tokens, stop=[" the"])["text"] == ""
        for echo in (False, True):
            with server.opened(prompt, max_tokens, model="scripted", echo=echo) as events:
                text = "".join(chunk["choices"][0]["text"] for chunk in events)
            assert text == PROMPT * echo + ANSWER


def test_openais_log_probabilities(server: RealServer, tokenizer: Tokenizer) -> None:
    max_tokens = len(answer_ids(tokenizer))
    for echo in (False, True):
        choice = complete(server, PROMPT, max_tokens, logprobs=4, echo=echo)
        text = choice["text"]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == text
        assert all(text[at:].startswith(part) for at, part in zip(logprobs["text_offset"], logprobs["tokens"]))
        assert all(len(top) >= 4 for top in logprobs["top_logprobs"] if top)


def test_openais_chat_has_the_bytes_of_each_token(server: RealServer, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "add_special_tokens": True}
    body |= {"model": "scripted", "max_tokens": len(answer_ids(tokenizer)), "logprobs": True, "top_logprobs": 2}
    answer = server.post("/v1/chat/completions", **body)["choices"][0]
    assert answer["message"]["content"] == ANSWER
    assert b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"]["content"]).decode() == ANSWER


def triton(server: RealServer, path: str, **body: Any) -> Any:
    return server.post(f"/v2/models/{path}", **{"bad_words": "", "stop_words": "", **body})


def test_triton(server: RealServer, tokenizer: Tokenizer) -> None:
    options = {"text_input": PROMPT, "max_tokens": len(answer_ids(tokenizer))}
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert triton(server, f"{model}/generate", **options)["text_output"] == PROMPT + ANSWER
        alone = {**options, "exclude_input_in_output": True}
        assert triton(server, f"{model}/generate", **alone)["text_output"] == ANSWER
        stopped = triton(server, f"{model}/generate", **alone | {"stop_words": "cat"})["text_output"]
        assert stopped == ANSWER[: ANSWER.index("cat") + 3]
        status, _, data = server.request("POST", f"/v2/models/{model}/generate_stream", {**options, "stream": True})
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
        assert status == 200 and "".join(event["text_output"] for event in events) == ANSWER


def test_tritons_chain_of_models(server: RealServer, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT).tolist()
    answer = answer_ids(tokenizer)

    def text(tokens: list[int], **options: Any) -> str:
        inputs = {"TOKENS_BATCH": ("INT32", [[tokens]]), "SEQUENCE_LENGTH": ("INT32", [[len(tokens)]]), **options}
        tensors = []
        for name, (datatype, values) in inputs.items():
            tensors.append({"name": name, "datatype": datatype, "shape": np.shape(values), "data": values})
        (output,) = server.post("/v2/models/postprocessing/infer", inputs=tensors)["outputs"]
        return output["data"][0]

    assert text(prompt + answer) == PROMPT + ANSWER
    pieces = [
        text([token], CONTEXT_IDS=("INT32", [[prompt + answer[:at]]]), IS_LAST=("BOOL", [[at == len(answer) - 1]]))
        for at, token in enumerate(answer)
    ]
    assert "".join(pieces) == ANSWER
    assert text([], CONTEXT_IDS=("INT32", [[prompt]])) == ""


def test_python_and_a_file_of_prompts(model: Model, tokenizer: Tokenizer, tmp_path: Any) -> None:
    max_tokens = len(answer_ids(tokenizer))
    ids = tokenizer.encode(PROMPT).tolist()
    generation = generate(model, tokenizer, [PROMPT], max_tokens)
    assert "".join(piece.text for piece in generation) == generation.completions[0].choices[0].text == ANSWER
    lines = [{"prompt": PROMPT, "max_tokens": max_tokens}, {"prompt": ids, "max_tokens": max_tokens, "stop": "cat"}]
    lines.append({"prompt": [1] * BANS_AT, "max_tokens": 12, "bad_words": ["true"]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate_file(model, tokenizer, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    records = sorted(
        map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()), key=lambda record: record["line"]
    )
    texts = [record["choices"][0]["text"] for record in records]
    assert texts[:2] == [ANSWER, ANSWER.partition("cat")[0]] and "true" not in texts[2]


def test_the_command_line_with_any_encoding_of_stdout(results: Results, tokenizer: Tokenizer) -> None:
    command = ["generate", scripted_model.TARGET, "--results", results.root, "--prompt", PROMPT]
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", *map(str, command), "--max-new-tokens", str(len(answer_ids(tokenizer)))],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert process.stdout.decode("latin-1") == ANSWER.replace("𓀀", r"\ud80c\udc00") + "\n"


def test_a_bad_word_comes_in_none_of_its_spellings(server: RealServer, tokenizer: Tokenizer) -> None:
    prompt = [1] * BANS_AT
    assert "true" in complete(server, prompt, 12)["text"]
    assert "true" not in complete(server, prompt, 12, bad_words=["true"])["text"]
    several = complete(server, prompt, 12, bad_words=["true", "rue", "t"])["text"]
    assert not any(word in several for word in ("true", "rue", "t")) and several
    drawn = server.complete(prompt, 12, model="scripted", bad_words=["true"], temperature=5, n=4, seed=1)["choices"]
    assert not any("true" in choice["text"] for choice in drawn)


def test_a_bad_word_is_in_no_text_of_an_engine_that_draws(model: Model, tokenizer: Tokenizer) -> None:
    sampling = [Sampling(temperature=8.0, seed=seed, bad_words=("e",)) for seed in range(8)]
    completions = Engine(model).generate([[1] * BANS_AT] * 8, tokenizer, sampling, 12)
    assert not any("e" in completion.choices[0].text for completion in completions)


def test_an_answer_that_goes_on_after_an_interruption_does_not_complete_a_bad_word(
    model: Model, tokenizer: Tokenizer
) -> None:
    def token_of(text: str) -> int:
        return next(ids[0] for ids in tokenizer.spellings(text) if tokenizer.token_text(ids[0]) == text)

    *earlier, last = map(token_of, ("t", "ru", "e"))
    for words, completes in ((), True), (("true",), False):
        prompt = [1] * BANS_AT
        sampling = Sampling(logit_bias={last: 1e6}, bad_words=words)
        (output,) = Engine(model).run([Request(prompt, len(earlier) + 1, sampling=sampling, answer_ids=earlier)])
        assert (tokenizer.decode([*earlier, output.token]).endswith("true")) == completes
