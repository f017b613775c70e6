"""Anthropic's Messages API and OpenAI's Responses API of `lockstep serve`, the real one, of a model with a script.

The openai package is the judge of the latter; of the former, what Anthropic's documentation says, as plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import scripted_model
from scripted_chats import ANSWERS, BERLIN, PARIS, TIME, TWO_CALLS, WEATHER, prompt, scripted_chats

from lockstep.targets import Results
from lockstep_serve.messages import partial_json
from real_server import RealServer
from shared import Shared

pytestmark = pytest.mark.exports

FUNCTIONS = [tool["function"] for tool in (WEATHER, TIME)]
FLAT = [{"type": "function", **function} for function in FUNCTIONS]
TOOLS = [{"name": item["name"], "input_schema": item["parameters"]} for item in FUNCTIONS]
CUT = 38  # tokens of a call, up to its first argument
TWO = [("weather", json.loads(PARIS)), ("weather", json.loads(BERLIN))]


@pytest.fixture(scope="module")
def results(shared: Shared) -> Results:
    return scripted_chats(shared)


@pytest.fixture(scope="module")
def server(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("a-key\n")
    with RealServer(results.root, "--api-key-file", keys, target=scripted_model.TARGET) as server:
        yield server


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-key", max_retries=0, timeout=60) as client:
        yield client


def send(server: RealServer, path: str, body: dict[str, Any], key: str = "a-key") -> tuple[int, bytes]:
    headers = {
        "x-api-key": key, "Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01", "X-Request-Id": "mine",
    }  # fmt: skip
    status, _, data = server.request("POST", path, body, headers)
    return status, data


def message(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt(text), "cache_control": {}}]}]
    return {"model": "scripted", "max_tokens": 128, "temperature": 0, "messages": messages, **options}


def answer(server: RealServer, text: str, **options: Any) -> dict[str, Any]:
    """Return an answer of Anthropic's API, after a look whether its stream makes the same one."""
    status, data = send(server, "/v1/messages", message(text, **options))
    assert status == 200, data
    full_message = uncached(json.loads(data))
    status, data = send(server, "/v1/messages", message(text, stream=True, **options))
    assert status == 200, data
    streamed = uncached(joined(data))
    assert streamed == full_message
    return full_message


def uncached(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without how many of its prompt's tokens were found again, which is another at the second."""
    usage = answer["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return answer


def joined(data: bytes) -> dict[str, Any]:
    """Return the message that events make, as Anthropic's documentation says."""
    events = []
    for event in data.decode().split("\n\n")[:-1]:
        head, line = event.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert head == f"event: {events[-1]['type']}"
    first, *blocks, end, last = events
    assert (first["type"], end["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message = first["message"]
    arguments = ""
    assert message["content"] == [] and message["stop_reason"] is None
    is_open = False
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments = ""
            is_open = True
        assert is_open and event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = partial_json(arguments)
        elif event["type"] == "content_block_delta":
            kind, field = {
                "text": ("text_delta", "text"),
                "thinking": ("thinking_delta", "thinking"),
                "tool_use": ("input_json_delta", "partial_json"),
            }[block["type"]]
            assert event["delta"]["type"] == kind
            if block["type"] == "tool_use":
                arguments += event["delta"][field]
            else:
                block[field] += event["delta"][field]
    assert not is_open
    return {**message, **end["delta"], "usage": end["usage"]}


def test_a_message_of_text(server: RealServer) -> None:
    actual = answer(server, ANSWERS[460])
    assert actual["id"].startswith("msg_") and (actual["type"], actual["role"]) == ("message", "assistant")
    assert actual["content"] == [{"type": "text", "text": ANSWERS[460]}] and actual["model"] == "scripted"
    assert (actual["stop_reason"], actual["stop_sequence"], actual["usage"]["input_tokens"]) == ("end_turn", None, 460)
    assert answer(server, ANSWERS[460], max_tokens=2)["stop_reason"] == "max_tokens"
    actual = answer(server, ANSWERS[460], stop_sequences=["known"])
    assert (actual["stop_reason"], actual["stop_sequence"]) == ("stop_sequence", "known")


def test_a_message_with_calls(server: RealServer) -> None:
    actual = answer(server, TWO_CALLS, tools=TOOLS)
    text, *calls = actual["content"]
    assert text == {"type": "text", "text": "Let me look."} and actual["stop_reason"] == "tool_use"
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [("tool_use", *item) for item in TWO]
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    (call,) = answer(server, ANSWERS[140], tools=TOOLS, tool_choice=choice)["content"]
    assert call["name"] == "weather" and call["input"]["city"] in ("Paris", "Berlin")
    (text,) = answer(server, TWO_CALLS, tools=TOOLS, tool_choice={"type": "none"})["content"]
    assert text["text"] == TWO_CALLS


def test_thinking_comes_where_it_is_asked_for(server: RealServer) -> None:
    thinking, text = answer(server, ANSWERS[260], thinking={"type": "enabled", "budget_tokens": 1024})["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "I <b>think.", "Paris.")
    assert [block["type"] for block in answer(server, ANSWERS[260])["content"]] == ["text"]
    actual = answer(server, ANSWERS[260], thinking={"type": "enabled", "budget_tokens": 3})
    assert "I <b>think.".startswith(actual["content"][0]["thinking"])
    assert actual["usage"]["output_tokens_details"]["thinking_tokens"] == 3 + 2  # and the marks


def test_results_of_tools_go_to_the_template_and_tokens_are_counted(server: RealServer) -> None:
    turns = [
        {"role": "user", "content": "\n" * 9},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "rain"}]},
    ]
    body = {"model": "scripted", "messages": turns, "tools": TOOLS, "system": "not shown"}
    status, data = send(server, "/v1/messages/count_tokens", body)
    header = {"Authorization": "Bearer a-key"}
    text = {"prompt": "\n" * 9 + "weatherParisrain"}
    expected = json.loads(server.request("POST", "/tokenize", text, header)[2])["count"]
    assert (status, json.loads(data)) == (200, {"input_tokens": expected})
    status, data = send(server, "/v1/messages", {**body, "max_tokens": 1})
    usage = json.loads(data)["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (expected, 0, 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no length": ({"max_tokens": None}, "max_tokens: expected a value"),
    "a tool of the provider": ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "of the client's own"),
    "a choice that is none": ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice: expected type auto"),
    "a budget that is none": ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking: expected 0 or more"),
    "a thinking that is none": ({"thinking": {"type": "deep"}}, "thinking: expected type enabled"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]: expected a block of text",
    ),
    "an effort that is none": ({"output_config": {"effort": "most"}}, "output_config: expected none, minimal"),
    "servers of others": ({"mcp_servers": [{"url": "a"}]}, "mcp_servers: not supported"),
}


@pytest.mark.parametrize(("fields", "line"), REFUSED.values(), ids=REFUSED)
def test_errors_of_messages_are_anthropics(server: RealServer, fields: dict, line: str) -> None:
    status, data = send(server, "/v1/messages", message(TWO_CALLS, **fields))
    error = json.loads(data)
    assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert line in error["error"]["message"] and "\n" not in error["error"]["message"]


def test_a_thread_is_refused_as_the_package_expects(server: RealServer) -> None:
    status, data = send(server, "/v1/messages", message(TWO_CALLS, thread={"type": "create"}))
    error = json.loads(data)["error"]
    assert (status, error["details"]["error_code"]) == (400, "thread_unsupported_request")
    assert "thread: expected none, for this server keeps nothing" in error["message"]


def test_a_message_in_a_form(server: RealServer) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": ["Paris!"]}}, "effort": "low"}
    (text,) = answer(server, ANSWERS[260], output_config=form)["content"]
    assert text == {"type": "text", "text": '"Paris!"'}


def test_a_wrong_key_is_refused_in_anthropics_words(server: RealServer) -> None:
    status, data = send(server, "/v1/messages", message(TWO_CALLS), key="wrong")
    assert (status, json.loads(data)["error"]["type"]) == (401, "authentication_error")


def respond(client: openai.OpenAI, text: str, **options: Any) -> Any:
    """Return a response, after a look whether its stream makes the same one."""
    body = {"model": "scripted", "input": prompt(text), "temperature": 0, **options}
    full_response = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    streamed = events[-1].response
    if streamed.status == "completed":
        with client.responses.stream(**body) as stream:
            assert plain(stream.get_final_response()) == plain(streamed)
    assert plain(streamed) == plain(full_response)
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == full_response.output_text
    return full_response


def plain(response: Any) -> Any:
    """Return the output without what differs from one request to the next."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)  # of the package
        item.pop("parsed_arguments", None)
    usage = response.usage
    return response.status, items, usage.output_tokens_details, usage.output_tokens, usage.total_tokens


def test_a_response_of_text(client: openai.OpenAI) -> None:
    actual = respond(client, ANSWERS[460])
    assert (actual.output_text, actual.status, actual.store) == (ANSWERS[460], "completed", False)
    assert (actual.usage.input_tokens, actual.usage.total_tokens) == (460, 460 + actual.usage.output_tokens)
    assert actual.id.startswith("resp_")
    cut = respond(client, ANSWERS[460], max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_a_response_with_calls_and_their_results(client: openai.OpenAI) -> None:
    response = respond(client, TWO_CALLS, tools=FLAT)
    text, *calls = response.output
    assert text.content[0].text == "Let me look." and {call.type for call in calls} == {"function_call"}
    assert [(call.name, json.loads(call.arguments)) for call in calls] == TWO
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "\n" * 9}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": PARIS},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
    ]
    count = client.completions.create(model="scripted", prompt="\n" * 9 + "weatherParisrain", max_tokens=1).usage
    again = client.responses.create(model="scripted", input=turns, tools=FLAT, max_output_tokens=1)
    assert again.usage.input_tokens == count.prompt_tokens
    choice = {"type": "function", "name": "weather"}
    (call,) = respond(client, ANSWERS[140], tools=FLAT, tool_choice=choice, parallel_tool_calls=False).output
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Paris", "Berlin")


def test_a_call_that_is_cut_short_is_the_same_in_a_stream_and_is_taken_back(
    server: RealServer, client: openai.OpenAI
) -> None:
    options = {"model": "scripted", "tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": CUT}
    turns: list[Any] = [{"role": "user", "content": prompt(ANSWERS[140])}]
    full = client.chat.completions.create(messages=turns, **options).choices[0]
    (call,) = full.message.tool_calls
    assert full.finish_reason == "length" and "city" in call.function.arguments
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)
    chunks = client.chat.completions.create(messages=turns, stream=True, **options)
    streamed_arguments = ""
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or ():
            streamed_arguments += delta.function.arguments
    assert streamed_arguments == call.function.arguments
    for arguments in (call.function.arguments, "", "null", " \n"):
        again = full.message.model_dump(exclude_none=True)
        again["tool_calls"][0]["function"]["arguments"] = arguments
        results = [again, {"role": "tool", "tool_call_id": call.id, "content": "x"}, turns[0]]
        client.chat.completions.create(messages=[turns[0], *results], **{**options, "max_tokens": 1})
    call_options = {"tools": FLAT[:1], "tool_choice": "required", "max_output_tokens": CUT}
    (item,) = respond(client, ANSWERS[140], **call_options).output
    assert "city" in item.arguments and item.status == "incomplete"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "x"}
    turns = [{"role": "user", "content": "x"}, item.model_dump(exclude_none=True), result]
    client.responses.create(model="scripted", input=turns, max_output_tokens=1)
    actual = answer(server, ANSWERS[140], tools=TOOLS[:1], tool_choice={"type": "any"}, max_tokens=CUT)
    assert actual["stop_reason"] == "max_tokens" and actual["content"][0]["type"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": actual["content"][0]["id"], "content": "x"}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": actual["content"]}]
    body = {"model": "scripted", "max_tokens": 1, "messages": [*turns, {"role": "user", "content": [result]}]}
    assert send(server, "/v1/messages", body)[0] == 200


def test_a_response_with_reasoning_and_a_form(client: openai.OpenAI) -> None:
    reasoning, text = respond(client, ANSWERS[260], reasoning={"effort": "low"}).output
    assert reasoning.content[0].text == "I <b>think." and text.content[0].text == "Paris."
    actual = respond(client, ANSWERS[260])
    assert 0 < actual.usage.output_tokens_details.reasoning_tokens < actual.usage.output_tokens
    assert actual.usage.input_tokens_details.cached_tokens == 256  # a chunk of the prompt before
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "form", "schema": schema, "strict": True}}
    actual = client.responses.create(model="scripted", input=prompt(ANSWERS[260]), temperature=0, text=form)
    assert json.loads(actual.output_text) == {"a": "b"}


# What Codex CLI sends (codex-rs/codex-api/src/common.rs and codex-rs/tools/src/tool_spec.rs of openai/codex).
CODEX: dict[str, Any] = {
    "model": "scripted", "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": prompt(ANSWERS[310])}]},
    ],
    "tools": [
        {**FLAT[0], "strict": False},
        {**FLAT[1], "strict": False},
        {"type": "web_search", "external_web_access": False},
        {
            "type": "custom", "name": "apply_patch", "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.*/"},
        },
        {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [FLAT[0]]},
        {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {"type": "object"}},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "service_tier": "priority",
    "prompt_cache_key": "019a-7c", "text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "a"},
}  # fmt: skip


def test_the_request_of_codex_gets_an_answer(server: RealServer) -> None:
    status, data = send(server, "/v1/responses", CODEX)
    assert status == 200, data
    events = [json.loads(event.split("\ndata: ")[1]) for event in data.decode().split("\n\n")[:-1]]
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.completed", "completed")
    left_out = "'custom', 'image_generation', 'namespace', 'tool_search', 'web_search'"
    assert response["metadata"] == {
        "warning": f"tools of these types are left out, for this server runs none: {left_out}"
    }
    reasoning, call = response["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "time", "{}")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    again = {**CODEX, "input": [*CODEX["input"], {**reasoning, "encrypted_content": None}, call, result]}
    assert send(server, "/v1/responses", {**again, "max_output_tokens": 1})[0] == 200
    only = {**CODEX, "tools": CODEX["tools"][2:], "stream": False}
    assert json.loads(send(server, "/v1/responses", only)[1])["output"][1]["type"] == "message"


def test_what_clients_send_though_it_is_not_quite_right_is_taken_and_said_once(server: RealServer) -> None:
    user = {"role": "user", "content": "x"}
    result = {"role": "tool", "tool_call_id": "gone", "content": "noon"}
    nulls = {"type": "object", "properties": None, "required": None}
    tool = {"type": "function", "function": {"name": "f", "parameters": nulls}}
    chat = {"model": "scripted", "messages": [user], "max_tokens": 1}
    orphan = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "gone", "content": "noon"}]}
    for body in (
        {**chat, "seed": -1},
        {**chat, "max_tokens": -1, "stop_token_ids": list(range(100))},
        {**chat, "messages": [result, user]},
        {**chat, "messages": [{**user, "content": prompt(ANSWERS[140])}], "tools": [tool], "tool_choice": "any"}
        | {"max_tokens": 64, "parallel_tool_calls": False},
    ):
        status, data = send(server, "/v1/chat/completions", body)
        assert status == 200, data
    ((call,),) = [choice["message"]["tool_calls"] for choice in json.loads(data)["choices"]]
    assert call["function"]["name"] == "f"
    for body in ({"store": True}, {"truncation": "auto"}):
        status, data = send(
            server, "/v1/responses", {"model": "scripted", "input": "x", "max_output_tokens": 1, **body}
        )
        answer = json.loads(data)
        assert (status, answer["store"], answer["truncation"]) == (200, False, "disabled")
    assert send(server, "/v1/messages", {"model": "scripted", "max_tokens": 1, "messages": [orphan]})[0] == 200
    log = server.stderr
    for line in ("seed -1 is", "max_tokens -1", "a tool's result without", "null as properties", '"any"', "store true"):
        assert log.count(line) == 1, (line, log)


STATE = {"previous_response_id": "resp_1", "conversation": "conv_1", "background": True}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    **{name: ({name: value}, name, "keeps nothing between requests") for name, value in STATE.items()},
    "what to include": ({"include": ["file_search_call.results"]}, "include", "found 'file_search_call.results'"),
    "an item that is none": ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "found 'item_reference'"),
    "too many tokens": ({"max_output_tokens": 9999}, "max_output_tokens", "max_output_tokens: expected 1 to"),
    "a schema that is none": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}},
        "text",
        "text: expected a grammar that llguidance takes",
    ),
    "a form that is none": ({"text": {"format": {"type": "xml"}}}, "text", "found 'xml'"),
}


@pytest.mark.parametrize(("fields", "param", "line"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_a_response_is_named(client: openai.OpenAI, fields: dict, param: str, line: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "scripted", "input": "x", **fields})
    assert caught.value.param == param and line in caught.value.message
