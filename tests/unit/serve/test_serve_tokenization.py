"""`lockstep serve`, the real one: vLLM's /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from demo_model import DEMO
from test_serve_chat import change_texts, with_first_token

from lockstep.runtime import Tokenizer
from lockstep.targets import Results
from real_server import RealServer, make_tree

PROMPT = "Once upon a time <eos>, naïve 🙂"
KEY = {"Authorization": "Bearer a-key"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "tokenizer.json")


@pytest.fixture(scope="module")
def other(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One of a model without a chat template, whose tokenizer puts a token before each prompt, with an API key."""
    folder = tmp_path_factory.mktemp("other")
    tree = make_tree(folder / "results", demo)
    change_texts(tree, tokenizer=with_first_token(demo, "A"), chat_template=None)
    (folder / "keys").write_text("a-key\n")
    with RealServer(tree, "--api-key-file", folder / "keys") as server:
        yield server


def test_a_text_becomes_tokens_and_they_the_text(server: RealServer, tokenizer: Tokenizer) -> None:
    response = server.post("/tokenize", prompt=PROMPT)
    tokens = tokenizer.encode(PROMPT).tolist()
    assert response == {"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": None}
    assert server.post("/detokenize", tokens=tokens) == {"prompt": PROMPT}
    named = server.post("/tokenize", model="demo-llama", prompt=PROMPT, return_token_strs=True)
    assert named["tokens"] == tokens and named["token_strs"][0] == "Once"[: len(named["token_strs"][0])]
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    assert [vocabulary.get(name, 0) for name in named["token_strs"]] == tokens


def test_nothing_is_no_token(server: RealServer) -> None:
    assert server.post("/tokenize", prompt="")["tokens"] == []
    assert server.post("/detokenize", tokens=[]) == {"prompt": ""}


def test_a_chat_has_the_tokens_that_its_completion_counts(server: RealServer) -> None:
    messages = [{"role": "user", "content": "Ice floats because"}]
    response = server.post("/tokenize", messages=messages)
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert response["count"] == answer["usage"]["prompt_tokens"] == len(response["tokens"])
    continued = [*messages, {"role": "assistant", "content": " it is"}]
    ended = server.post("/tokenize", messages=continued, add_generation_prompt=False)
    opened = server.post("/tokenize", messages=continued, add_generation_prompt=False, continue_final_message=True)
    assert ended["tokens"] == [*opened["tokens"], 0]  # <eos>
    assert server.post("/detokenize", tokens=ended["tokens"]) == {"prompt": "Ice floats because it is<eos>"}


def test_the_tokens_that_the_tokenizer_adds_can_be_asked_for_or_not(other: RealServer) -> None:
    def tokens(**options: Any) -> list[int]:
        status, _, data = other.request("POST", "/tokenize", {"prompt": "Ice", **options}, KEY)
        assert status == 200, data
        return json.loads(data)["tokens"]

    bare = tokens(add_special_tokens=False)
    assert tokens() == tokens(add_special_tokens=True) == tokens(add_special_tokens=None) != bare
    assert tokens()[1:] == bare


def test_the_tokenizer_tells_its_special_tokens_and_template(server: RealServer, other: RealServer) -> None:
    tokenizer_config = json.loads((DEMO / "tokenizer_config.json").read_text())
    actual = server.get("/tokenizer_info")
    assert {name: actual[name] for name in ("eos_token", "chat_template", "tokenizer_class")} == {
        name: tokenizer_config[name] for name in ("eos_token", "chat_template", "tokenizer_class")
    }
    assert actual["model_max_length"] == 256 and "bos_token" not in actual
    actual = json.loads(other.request("GET", "/tokenizer_info", headers=KEY)[2])
    assert (actual["eos_token"], actual["bos_token"], actual["chat_template"]) == ("<eos>", "A", None)


REFUSED: dict[str, tuple[str, Any, str, str]] = {
    "nothing": ("/tokenize", {}, "prompt", "expected either prompt or messages, found neither"),
    "both": ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "found both"),
    "a list of texts": ("/tokenize", {"prompt": ["a"]}, "prompt", "expected `str | null`"),
    "no messages": ("/tokenize", {"messages": []}, "messages", "expected 1 to 4096 messages"),
    "a number as a switch": ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "expected"),
    "a template": ("/tokenize", {"messages": [], "chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    "tools": ("/tokenize", {"messages": [], "tools": [{}]}, "tools", "not supported"),
    "two ends": (
        "/tokenize",
        {"messages": [], "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "expected false with add_generation_prompt true",
    ),
    "no tokens": ("/detokenize", {}, "tokens", "expected a value, found none"),
    "a text": ("/detokenize", {"tokens": "a"}, "tokens", "expected `array`"),
    "a fraction": ("/detokenize", {"tokens": [1.5]}, "tokens[0]", "expected `int`"),
    "beyond the vocabulary": ("/detokenize", {"tokens": [1, 1 << 70]}, "tokens", "found 1180591620717411303424"),
}


@pytest.mark.parametrize(("path", "body", "param", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(server: RealServer, path: str, body: Any, param: str, line: str) -> None:
    status, _, data = server.request("POST", path, body)
    error = json.loads(data)["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ") and line in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_model_is_not_found_and_a_key_is_needed(
    server: RealServer, other: RealServer, path: str, body: dict[str, Any]
) -> None:
    status, _, data = server.request("POST", path, {**body, "model": "another"})
    assert status == 404 and json.loads(data)["error"]["param"] == "model"
    assert [other.request("POST", path, body, headers)[0] for headers in ({}, KEY)] == [401, 200]
    assert other.request("GET", "/tokenizer_info")[0] == 401


def test_a_model_without_a_template_has_no_chats(other: RealServer) -> None:
    status, _, data = other.request("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}]}, KEY)
    assert status == 400 and "the model has no chat template" in json.loads(data)["error"]["message"]


def test_a_long_text_holds_up_nobody(server: RealServer, tokenizer: Tokenizer) -> None:
    """Other requests are answered while it is encoded, and while its tokens are decoded."""
    text = "Once upon a time there was a text. " * 2_000

    def send(path: str, **body: Any) -> Any:
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(server.post, path, **body) for _ in range(4)]
            meanwhile = 0
            while not all(answer.done() for answer in answers):
                server.get("/health")
                meanwhile += not all(answer.done() for answer in answers)
            assert meanwhile > 2
            return [answer.result() for answer in answers]

    actual = send("/tokenize", prompt=text, return_token_strs=True)
    assert all(item["tokens"] == tokenizer.encode(text).tolist() for item in actual)
    assert [item["prompt"] for item in send("/detokenize", tokens=actual[0]["tokens"])] == [text] * 4


def test_a_text_or_tokens_far_beyond_the_model_are_refused_at_once(server: RealServer) -> None:
    """4 MB took 500 MB and 20 s; now nothing of them is encoded. A prompt that is slightly too long gets its length."""
    text = "Once upon a time there was a text. " * 100_000
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        status, _, data = server.request("POST", "/tokenize", body)
        line = f"{next(iter(body))}: expected 1 to 16384 tokens, found at least "
        assert status == 400 and json.loads(data)["error"]["message"].startswith(line), data
    assert server.post("/tokenize", prompt="word " * 300)["count"] > 256
    assert server.post("/detokenize", tokens=[5] * 49152)["prompt"]
    status, _, data = server.request("POST", "/detokenize", {"tokens": [5] * 49153})
    assert status == 400 and "tokens: expected 0 to 49152 tokens, found 49153" in json.loads(data)["error"]["message"]
