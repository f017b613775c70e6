"""Texts of answers wherever they are given out, with tokenizers of published models and a model that says a script."""

from __future__ import annotations

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

from lockstep.runtime import Model, ModelOptions, Tokenizer, generate
from lockstep.runtime.batch_file import generate_file
from lockstep.targets import Results
from real_server import RealServer
from shared import Shared

# By day test_real_text.py has the same texts, bad words and log-probabilities without a server.
pytestmark = [pytest.mark.exports, pytest.mark.long]

PROMPT = "x"
ANSWER = " the 𓀀cat the\n"
TEMPLATE = {"chat_template": "{{ messages[0]['content'] }}", "bos_token": "<s>"}


@pytest.fixture(scope="module", params=[SENTENCEPIECE, TEKKEN])
def results(shared: Shared, request: pytest.FixtureRequest) -> Results:
    path = tokenizer_json(shared, request.param)

    def make(folder: Any) -> None:
        tokenizer = Tokenizer(path)
        ids = answer_ids(tokenizer)
        script: dict[int, Any] = {len(tokenizer.encode(PROMPT)) - 1 + at: token for at, token in enumerate(ids)}
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
        engines, results.assembly("scripted", "fp32"), weights, options=ModelOptions(max_batch_size=2, max_seq_len=64)
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
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate_file(model, tokenizer, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    records = sorted(
        map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()), key=lambda record: record["line"]
    )
    texts = [record["choices"][0]["text"] for record in records]
    assert texts == [ANSWER, ANSWER.partition("cat")[0]]


def test_the_command_line_with_any_encoding_of_stdout(results: Results, tokenizer: Tokenizer) -> None:
    command = ["generate", scripted_model.TARGET, "--results", results.root, "--prompt", PROMPT]
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", *map(str, command), "--max-new-tokens", str(len(answer_ids(tokenizer)))],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert process.stdout.decode("latin-1") == ANSWER.replace("𓀀", r"\ud80c\udc00") + "\n"
