"""`lockstep serve`, the real one: chat completions and completions by the `openai` package and by plain HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.artifacts.files import read_json, write_bytes, write_json
from lockstep.targets import Results
from real_server import RealServer, make_tree

# as in config/config.yaml
PROMPT = "San Francisco is a"
TEXT = " hilly city on the coast of California, where cool"
# then the end of sequence
ICE = "Ice floats because"
WATER = " it is lighter than water."
USER = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"model": "demo-llama", "temperature": 0}
KEY = "a key"
# Loops without an end where it is asked to, and writes the token that its tokenizer adds to a prompt.
LOOPS = """\
{{ bos_token }}{{ word }}{% for message in messages %}{{ message.content }}{% endfor %}
{%- if loops %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"""


@pytest.fixture(scope="module")
def other(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One with the template `LOOPS`, a tokenizer that puts a token before each prompt, and an API key."""
    folder = tmp_path_factory.mktemp("other")
    tree = make_tree(folder / "results", demo)
    template = ChatTemplate(LOOPS, {"bos_token": "<eos>"})
    change_texts(tree, tokenizer=with_first_token(demo, "<eos>"), chat_template=template.to_bytes())
    (folder / "keys").write_text(f"another\n{KEY.replace(' ', '-')}\n")
    with RealServer(tree, "--api-key-file", folder / "keys") as server:
        yield server


def with_first_token(demo: Results, name: str) -> bytes:
    """The demo's tokenizer.json that puts a token before each prompt."""
    tokenizer = json.loads(demo.assembly("demo-llama", "fp32").with_name("tokenizer.json").read_bytes())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [tokenizer["model"]["vocab"][name]], "tokens": [name]}},
    }
    return json.dumps(tokenizer).encode()


def change_texts(tree: Path, **texts: bytes | None) -> None:
    """Other files of tokenizer or chat template in a tree, as if they had been exported; None: none."""
    path = Results(tree).assembly("demo-llama", "fp32")
    value = read_json(path)
    for key, data in texts.items():
        name = value.pop(key)["file"]
        if data is not None:
            write_bytes(path.with_name(name), data)
            value[key] = {"file": name, "sha256": hashlib.sha256(data).hexdigest()}
    write_json(path, value)


def client_of(server: RealServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def chat(client: openai.OpenAI, messages: Any = USER, **options: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": messages, "max_tokens": 16, **options})


def test_a_chat_is_the_completion_of_its_prompt(client: openai.OpenAI) -> None:
    answer = chat(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "length")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "demo-llama"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 16)
    turns = [{"role": "user", "content": ICE}, {"role": "assistant", "content": WATER}, *USER]
    full = client.completions.create(**GREEDY, prompt=f"{ICE}{WATER}<eos>{PROMPT}", max_tokens=16)
    again = chat(client, turns)
    assert again.choices[0].message.content == full.choices[0].text
    assert again.usage.prompt_tokens == full.usage.prompt_tokens
    ended = chat(client, turns[:1])
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == (WATER, "stop")


def test_parts_of_text_are_lines_and_nulls_are_left_out(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "San"}, {"type": "text", "text": PROMPT}]
    actual = chat(client, [{"role": "user", "content": parts, "name": None}])
    expected = client.completions.create(**GREEDY, prompt=f"San\n{PROMPT}", max_tokens=16)
    assert actual.choices[0].message.content == expected.choices[0].text
    assert actual.usage == expected.usage


def test_a_stream_opens_with_the_role_and_ends_with_the_reason(client: openai.OpenAI) -> None:
    *chunks, usage = chat(client, stream=True, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content for delta in deltas[1:-1]) == TEXT
    assert deltas[-1].content is None and deltas[-1].role is None
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert usage.choices == [] and usage.usage.completion_tokens == 16
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chat(client, stream=True))


def test_a_stop_string_ends_a_chat_and_is_no_part_of_it(client: openai.OpenAI) -> None:
    answer = chat(client, stop=[" coast", "never"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (" hilly city on the", "stop")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stop=" coast", stream=True))
    assert text == " hilly city on the"


def test_a_chat_has_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": ["big", "small"]}}, "required": ["size"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for seed in range(3):
        answer = chat(client, response_format=form, temperature=1.5, seed=seed, max_tokens=60)
        assert json.loads(answer.choices[0].message.content)["size"] in ("big", "small")
        assert answer.choices[0].finish_reason == "stop"


def test_n_choices_are_drawn_by_the_seed(client: openai.OpenAI) -> None:
    drawn = {"n": 3, "temperature": 1.5, "seed": 11, "max_tokens": 12}
    first, again = (chat(client, **drawn) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2] and first.usage.completion_tokens <= 36
    roles = []
    streamed = [""] * 3
    for chunk in chat(client, **drawn, stream=True):
        (choice,) = chunk.choices
        roles += [choice.index] if choice.delta.role else []
        streamed[choice.index] += choice.delta.content or ""
    assert (roles, streamed) == ([0, 1, 2], texts)


def test_logprobs_are_those_of_the_completion(client: openai.OpenAI) -> None:
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == TEXT
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    for entry in entries:
        best = entry.top_logprobs[0]
        assert (best.token, best.logprob) == (entry.token, entry.logprob) and len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
    full = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=16, logprobs=3).choices[0]
    assert full.logprobs.tokens == [entry.token for entry in entries]
    assert full.logprobs.token_logprobs == [entry.logprob for entry in entries]
    assert (
        chat(client).choices[0].logprobs,
        chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs,
    ) == (None, [])
    streamed = []
    for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == entries


def test_a_token_that_is_a_part_of_a_character_has_its_bytes_and_the_end_its_name(client: openai.OpenAI) -> None:
    (choice,) = chat(client, [{"role": "user", "content": ICE}], logprobs=True).choices
    assert choice.logprobs.content[-1].token == "<eos>"
    options = {"logit_bias": {"127": 100}, "ignore_eos": True}  # the first byte of a character of several
    (entry,) = chat(client, max_tokens=1, logprobs=True, extra_body=options).choices[0].logprobs.content
    assert entry.token == "\N{REPLACEMENT CHARACTER}" and entry.bytes == [0xC2]


def test_a_developer_is_the_system(client: openai.OpenAI) -> None:
    answers = [chat(client, [{"role": role, "content": "San"}, *USER]) for role in ("system", "developer")]
    assert answers[0].choices == answers[1].choices and answers[0].usage == answers[1].usage


def test_without_a_limit_a_chat_takes_what_is_left(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=USER, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3


def test_the_last_message_is_continued(client: openai.OpenAI) -> None:
    messages = [*USER, {"role": "assistant", "content": " hilly city"}]
    answer = chat(client, messages, extra_body={"continue_final_message": True})
    full = client.completions.create(**GREEDY, prompt=f"{PROMPT} hilly city", max_tokens=16)
    assert answer.choices[0].message.content == full.choices[0].text and answer.usage == full.usage
    assert TEXT.startswith(" hilly city" + full.choices[0].text[:20])


def test_completions_by_the_package(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return client.completions.create(**{**GREEDY, "prompt": PROMPT, "max_tokens": 16, **options})

    assert ask().choices[0].text == TEXT and [model.id for model in client.models.list()] == ["demo-llama"]
    *chunks, usage = ask(stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT and usage.usage.total_tokens == 24
    several = ask(prompt=[PROMPT, ICE], n=2, temperature=1.5, seed=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3] and several.usage.prompt_tokens == 12
    logprobs = ask(logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == TEXT and [len(top) for top in logprobs.top_logprobs] == [2] * 16
    with pytest.raises(openai.BadRequestError) as caught:
        ask(temperature=-1)
    assert caught.value.param == "temperature"


def test_errors_are_those_of_the_package(client: openai.OpenAI, other: RealServer) -> None:
    for ask in (chat, lambda client, **options: client.completions.create(**{**GREEDY, "prompt": PROMPT, **options})):
        with pytest.raises(openai.NotFoundError) as missing:
            ask(client, model="another")
        assert missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as wrong:
            ask(client, max_tokens=1000)
        assert wrong.value.param == "max_tokens" and wrong.value.type == "invalid_request_error"
        with client_of(other, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
            ask(stranger)
        with client_of(other, "a-key") as authorized:
            ask(authorized, max_tokens=1)


REFUSED = {
    "no messages": ({"messages": []}, "messages", "expected 1 to 4096 messages, found 0 of them"),
    "a text": ({"messages": "hello"}, "messages", "found no list"),
    "no messages at all": ({"messages": ...}, "messages", "messages: expected a value, found none"),
    "too many tokens": ({"max_completion_tokens": 999}, "max_completion_tokens", "expected 1 to"),
    "documents": ({"documents": [{"text": "a"}]}, "documents", "not supported"),
    "no role": ({"messages": [{"content": "a"}]}, "messages", "messages[0]: expected an object with a role"),
    "another role": ({"messages": [*USER, {"role": "pope", "content": "a"}]}, "messages", "messages[1]: expected"),
    "no content": ({"messages": [{"role": "user"}]}, "messages", "messages[0].content: expected a text, or a list"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "messages",
        "messages[0].content[0]: expected a part",
    ),
    "a part without its text": (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}]}, "messages", "found 'refusal'",
    ),
    "a sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages",
        "this model reads text only; found 'input_audio'",
    ),
    "calls that are none": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "}"}}]}]}, "messages",
        "messages[0].tool_calls[0].function.arguments: expected JSON",
    ),
    "what the template refuses": (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "a"}]}, "messages",
        "expected a chat that the model's template renders, found: this model knows no tools",
    ),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "expected text in UTF-8"),
    "a long chat": ({"messages": [{"role": "user", "content": "a " * 600}]}, "messages", "tokens, found"),
    "tools": ({"tools": [{"function": {"name": "a"}}]}, "tools", "with --tool-call-parser NAME (json: plain JSON)"),
    "a tool that is chosen": ({"tool_choice": "auto"}, "tool_choice", "expected none without tools"),
    "variables that are none": ({"chat_template_kwargs": 3}, "chat_template_kwargs", "expected `object"),
    "the messages as a variable": (
        {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "expected no messages",
    ),
    "two ends": (
        {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
        "expected false with add_generation_prompt true",
    ),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected 0 to 20"),
    "logprobs that are not asked for": ({"top_logprobs": 2}, "top_logprobs", "with logprobs true"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(server: RealServer, fields: dict, param: str, line: str) -> None:
    body = {name: value for name, value in {**GREEDY, "messages": USER, **fields}.items() if value is not ...}
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, param) and line in error["message"] and "\n" not in error["message"]
    assert error["message"].startswith(param)


def test_what_means_nothing_is_taken(server: RealServer) -> None:
    nothing = {"tools": [], "tool_choice": "none", "functions": None, "modalities": ["text"], "user": "me", "n": None}
    answer = server.post("/v1/chat/completions", **GREEDY, messages=USER, max_tokens=16, top_logprobs=0, **nothing)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT}


def test_a_prompt_has_the_tokens_of_the_template_and_none_besides(other: RealServer) -> None:
    with client_of(other, "a-key") as client:
        assert client.completions.create(**GREEDY, prompt=PROMPT).usage.prompt_tokens == 9
        answer = chat(client)
        assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (9, TEXT)
        words = [{"role": "user", "content": PROMPT.removeprefix("San")}]
        options = {"chat_template_kwargs": {"word": "San", "bos_token": ""}}
        answer = chat(client, words, extra_body=options)
        assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (8, TEXT)


def test_the_tokens_that_the_tokenizer_adds_can_be_asked_for_or_not(other: RealServer) -> None:
    with client_of(other, "a-key") as client:
        for added, completed, chatted in ((None, 9, 9), (True, 9, 10), (False, 8, 9)):
            extra = {"extra_body": {"add_special_tokens": added}}
            answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=1, **extra)
            assert (answer.usage.prompt_tokens, chat(client, **extra).usage.prompt_tokens) == (completed, chatted)


@pytest.mark.long
def test_a_template_without_an_end_holds_up_no_completion(other: RealServer) -> None:
    with client_of(other, "a-key") as client:
        errors: list[openai.APIStatusError] = []

        def loop() -> None:
            with pytest.raises(openai.BadRequestError) as caught:
                chat(client, extra_body={"chat_template_kwargs": {"loops": True}})
            errors.append(caught.value)

        thread = threading.Thread(target=loop)
        thread.start()
        while_it_loops = 0
        while thread.is_alive():
            assert client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=16).choices[0].text == TEXT
            while_it_loops += thread.is_alive()
        thread.join()
        assert while_it_loops and "more than 2 s of processor time" in errors[0].message
        assert chat(client).choices[0].message.content == TEXT


def test_the_processes_of_a_server_find_packages_where_it_does(demo: Results, tmp_path: Path) -> None:
    """In an environment of modules, as on clusters, and behind `pip install --target`, they come by PYTHONPATH."""
    # type: ignore[attr-defined]
    python = sys._base_executable
    paths = os.pathsep.join(filter(None, sys.path))
    with RealServer(make_tree(tmp_path / "results", demo), python=python, PYTHONPATH=paths) as server:
        completion = client_of(server).chat.completions.create(messages=USER, max_tokens=4, **GREEDY)
    assert completion.usage.completion_tokens == 4
