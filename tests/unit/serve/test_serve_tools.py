"""Tools and reasoning of chats: `lockstep serve`, the real one, of a model that says what a script tells it to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import scripted_model
from jsonschema import Draft202012Validator
from scripted_chats import ANSWERS, BERLIN, PARIS, TIME, TOOLS, TWO_CALLS, WEATHER, chat_options, prompt, scripted_chats

from lockstep.targets import Results
from lockstep_serve.messages import plain_messages
from real_server import RealServer
from shared import Shared

pytestmark = pytest.mark.exports


@pytest.fixture(scope="module")
def results(shared: Shared) -> Results:
    return scripted_chats(shared)


@pytest.fixture(scope="module")
def server(results: Results) -> Iterator[RealServer]:
    with RealServer(results.root, target=scripted_model.TARGET) as server:
        yield server


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(**chat_options(text, **options)).choices[0]


def streamed(client: openai.OpenAI, text: str, **options: Any) -> Any:
    """Return the choice that the package itself makes of a stream."""
    with client.chat.completions.stream(**chat_options(text, **options)) as stream:
        return stream.get_final_completion().choices[0]


def function_calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def test_calls_of_an_answer(client: openai.OpenAI) -> None:
    choice = ask(client, TWO_CALLS, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    assert function_calls(choice) == [("weather", PARIS), ("weather", BERLIN)]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
    assert function_calls(ask(client, TWO_CALLS, tools=TOOLS, parallel_tool_calls=False)) == [("weather", PARIS)]
    plain = ask(client, TWO_CALLS, tools=TOOLS, tool_choice="none")
    assert plain.message.content == TWO_CALLS and plain.finish_reason == "stop" and not plain.message.tool_calls


def test_streamed_calls_have_the_name_first(client: openai.OpenAI) -> None:
    full = ask(client, TWO_CALLS, tools=TOOLS)
    joined = streamed(client, TWO_CALLS, tools=TOOLS)
    assert joined.message.content == full.message.content and joined.finish_reason == "tool_calls"
    assert function_calls(joined) == function_calls(full)
    chunks = client.chat.completions.create(**chat_options(TWO_CALLS, tools=TOOLS, stream=True))
    deltas = []
    for chunk in chunks:
        deltas += chunk.choices[0].delta.tool_calls or ()
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    names = [delta for delta in deltas if delta.id]
    assert [(item.index, item.function.name, item.function.arguments) for item in names] == [
        (0, "weather", ""),
        (1, "weather", ""),
    ]


def test_what_is_no_call_is_content_and_counted(server: RealServer, client: openai.OpenAI) -> None:
    def count(name: str) -> float:
        text = server.request("GET", "/metrics")[2].decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"lockstep:{name}_total"))

    assert ask(client, TWO_CALLS, tools=TOOLS).message.tool_calls
    text = ANSWERS[140]
    before = count("malformed_tool_calls")
    choice = ask(client, text, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == (text, "stop") and not choice.message.tool_calls
    assert streamed(client, text, tools=TOOLS).message.content == text
    assert count("malformed_tool_calls") == before + 2 and count("tool_calls") > 0
    cut = ask(client, TWO_CALLS, tools=TOOLS, max_tokens=30)
    assert cut.finish_reason == "length" and TWO_CALLS.startswith(cut.message.content) and not cut.message.tool_calls


def test_a_loop_gives_results_to_the_template(server: RealServer, client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    turns = [
        {"role": "user", "content": "\n" * 9},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    count = server.post("/tokenize", prompt="\n" * 9 + "weatherParisrain")["count"]
    answer = client.chat.completions.create(**chat_options(TWO_CALLS, messages=turns, tools=TOOLS, max_tokens=1))
    assert answer.usage.prompt_tokens == count
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, TWO_CALLS, tools=TOOLS, extra_body={"chat_template_kwargs": {"shown": True}})
    assert json.dumps(TOOLS)[:150] in caught.value.message


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_asked_for_is_held_to_the_schema(client: openai.OpenAI, choice: Any) -> None:
    for ask_for in (ask, streamed):  # the model would go on with other words
        answer = ask_for(client, ANSWERS[140], tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        ((name, arguments),) = function_calls(answer)
        assert name == "weather" and json.loads(arguments)["city"] in ("Paris", "Berlin")
        assert answer.finish_reason == "tool_calls" and not answer.message.content


def test_a_strict_function_is_held_from_where_the_call_begins(client: openai.OpenAI) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    answer = ask(client, ANSWERS[460], tools=[strict, TIME])
    assert answer.message.content == ANSWERS[460] and answer.finish_reason == "stop"
    answer = ask(client, TWO_CALLS, tools=[strict, TIME], max_tokens=110)
    actual = function_calls(answer)
    assert actual[0] == ("weather", PARIS)
    # The schema allows no days.
    assert all(not json.loads(arguments).get("days") for _, arguments in actual)


@pytest.fixture(scope="module")
def mistral(results: Results) -> Iterator[RealServer]:
    with RealServer(results.root, "--tool-call-parser", "mistral_args", target=scripted_model.TARGET) as server:
        yield server


def test_marks_that_are_special_tokens_are_read(mistral: RealServer) -> None:
    body = chat_options(ANSWERS[200], tools=TOOLS)
    (choice,) = mistral.post("/v1/chat/completions", **body)["choices"]
    results = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert results == [("weather", PARIS), ("time", "{}")] and choice["message"]["content"] is None
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in choice["message"]["tool_calls"])
    (plain,) = mistral.post("/v1/chat/completions", **chat_options(ANSWERS[200]))["choices"]
    assert plain["message"]["content"] == f"weather{PARIS}time{{}}"
    body = chat_options(ANSWERS[200], tools=[TIME], tool_choice="required", parallel_tool_calls=False)  # no weather
    (choice,) = mistral.post("/v1/chat/completions", **body)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]


@pytest.mark.long
def test_plain_json_is_a_convention_for_models_without_a_format(results: Results) -> None:
    def asks(text: str, **options: Any) -> tuple[Any, list[tuple[str, str]]]:
        (choice,) = server.post("/v1/chat/completions", **chat_options(text, tools=TOOLS, **options))["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        return choice, [(call["name"], call["arguments"]) for call in calls]

    with RealServer(results.root, "--tool-call-parser", "json", target=scripted_model.TARGET) as server:
        choice, calls = asks(ANSWERS[400])
        assert calls == [("weather", PARIS)] and choice["finish_reason"] == "tool_calls"
        assert asks(ANSWERS[460])[0]["message"]["content"] == ANSWERS[460] and asks(TWO_CALLS)[1] == []
        forced = {
            "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100, "thinking_token_budget": 0,
        }  # fmt: skip
        ((name, arguments),) = asks(ANSWERS[460], **forced)[1]
        assert name in ("weather", "time") and isinstance(json.loads(arguments), dict)


def test_reasoning_is_a_field_of_its_own(client: openai.OpenAI) -> None:
    for ask_for in (ask, streamed):
        message = ask_for(client, ANSWERS[260]).message
        # Whoever sends content to another turn must not send the reasoning.
        assert (message.content, message.reasoning, message.reasoning_content) == ("Paris.", *["I <b>think."] * 2)
    assert ask(client, ANSWERS[460]).message.reasoning is None
    answer = ask(client, ANSWERS[310], tools=TOOLS)
    assert (
        function_calls(answer) == [("time", "{}")]
        and answer.message.reasoning == "Look."
        and answer.message.content is None
    )


def test_reasoning_that_the_prompt_opens(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": prompt(ANSWERS[360], less=1)}]
    for ask_for in (ask, streamed):
        extra = {"chat_template_kwargs": {"thinks": True}}
        message = ask_for(client, ANSWERS[360], messages=messages, extra_body=extra).message
        assert (message.content, message.reasoning) == ("Done.", "still thinking")


def test_a_grammar_begins_after_the_reasoning(client: openai.OpenAI) -> None:
    forms = [
        {"structured_outputs": {"choice": ["Paris!", "Paris?"]}},
        {"structured_outputs": {"regex": "Paris[!?]"}},
        {"structured_outputs": {"grammar": 'start: "Paris" /[!?]/'}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["Paris!", "Paris?"]}}}},
    ]
    for form in forms:
        message = ask(client, ANSWERS[260], extra_body=form).message
        assert message.reasoning == "I <b>think." and message.content.strip('"') in ("Paris!", "Paris?")
    messages = [{"role": "user", "content": prompt(ANSWERS[360], less=1)}]
    extra = {"chat_template_kwargs": {"thinks": True}, "structured_outputs": {"choice": ["Done!"]}}
    message = ask(client, ANSWERS[360], messages=messages, extra_body=extra).message
    assert (message.content, message.reasoning) == ("Done!", "still thinking")


def test_a_budget_ends_the_reasoning(client: openai.OpenAI) -> None:
    def budget(tokens: int, text: str = ANSWERS[260], **extra: Any) -> tuple[Any, int]:
        completion = client.chat.completions.create(
            **chat_options(text, extra_body={"thinking_token_budget": tokens, **extra})
        )
        return completion.choices[0].message, completion.usage.completion_tokens_details.reasoning_tokens

    full, free = budget(-1)
    assert full.content == "Paris." and budget(free)[0].content == "Paris."
    for tokens in (0, 1, 4):
        message, actual = budget(tokens)
        assert actual == tokens + 2 and full.reasoning.startswith(message.reasoning or "")  # and the marks
    # Without reasoning there is nothing to end, and a grammar begins after it.
    assert budget(1, ANSWERS[460])[0].content == ANSWERS[460] and budget(1, ANSWERS[460])[1] == 0
    message, actual = budget(2, structured_outputs={"choice": ["Paris!"]})
    assert (message.content, actual) == ("Paris!", 4)


def test_reasoning_effort_goes_to_the_template(client: openai.OpenAI) -> None:
    for effort, thinks in (("none", "nonefalse"), ("low", "low")):
        with pytest.raises(openai.BadRequestError, match=rf"found: effort {thinks}\b"):
            ask(client, TWO_CALLS, reasoning_effort=effort, extra_body={"chat_template_kwargs": {"effort_shown": True}})


def test_the_plain_convention_is_told_to_the_model() -> None:
    calling = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "time", "arguments": "{}"}}]}
    turns = [USER, calling, {"role": "tool", "tool_call_id": "a", "content": "noon"}]
    system, *other_messages = plain_messages(turns, TOOLS)
    assert json.dumps(WEATHER["function"]) in system["content"] and system["role"] == "system"
    assert [message["role"] for message in other_messages] == ["user", "assistant", "user"]
    assert json.loads(other_messages[1]["content"]) == {"name": "time", "arguments": {}, "id": "a"}
    assert json.loads(other_messages[2]["content"]) == {"tool_call_id": "a", "result": "noon"}
    (first,) = plain_messages([{"role": "system", "content": "Be brief."}], TOOLS)
    assert first["content"].startswith("Be brief.\n\nYou can call")


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


USER = {"role": "user", "content": "x"}
REFUSED = {
    "no list": ({"tools": {"a": 1}}, "tools", "expected up to 128 tools, found no list"),
    "another type": ({"tools": [{"type": "retrieval"}]}, "tools", "found 'retrieval'"),
    "no name": ({"tools": [function(None)]}, "tools", "tools[0].function.name: expected 1 to 128"),
    "a name with a space": ({"tools": [function("a b")]}, "tools", "found 'a b'"),
    "a name twice": ({"tools": [function(), function()]}, "tools", "tools[1].function.name: expected each name once"),
    "too many": ({"tools": [function(f"f{number}") for number in range(129)]}, "tools", "found 129 of them"),
    "a deep schema": ({"tools": [function(parameters=DEEP)]}, "tools", "expected up to 32 levels, found 80"),
    "a large schema": ({"tools": [function(parameters={"title": "a" * 140_000})]}, "tools", "characters, found 140"),
    "a schema of a list": ({"tools": [function(parameters={"type": "array"})]}, "tools", "schema of an object"),
    "properties that are none": (
        {"tools": [function(parameters={"properties": 3})]}, "tools",
        "tools[0].function.parameters.properties: expected an object, found 3",
    ),
    "a schema that is none": (
        {"tools": [function(parameters={"properties": {"a": 3}})], "tool_choice": "required"}, "tools",
        "tools: expected a grammar",
    ),
    "an effort that is none": ({"reasoning_effort": "most"}, "reasoning_effort", "found 'most'"),
    "a budget that is none": (
        {"thinking_token_budget": -2}, "thinking_token_budget", "thinking_token_budget: expected 0 or more tokens",
    ),
    "strict that is none": ({"tools": [function(strict="yes")]}, "tools", "strict: expected true or false"),
    "a choice without tools": ({"tool_choice": "auto"}, "tool_choice", "expected none without tools"),
    "a choice that is none": ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "found 'maybe'"),
    "a choice of another": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
        "expected the name of one of tools, found 'g'",
    ),
    "arguments that are no object": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages", "messages[1].tool_calls[0].function.arguments: expected JSON of an object",
    ),
}  # fmt: skip


def test_the_openapi_document_is_that_of_the_bodies(server: RealServer) -> None:
    text = server.request("GET", "/openapi.json")[2].decode().replace("#/components/schemas/", "#/$defs/")
    document = json.loads(text)
    schemas = document["components"]["schemas"]
    assert set(re.findall(r"#/\$defs/(\w+)", text)) <= schemas.keys()
    validators = {}
    ids = []
    for path, operations in document["paths"].items():
        for operation in operations.values():
            ids.append(operation["operationId"])
            assert len(operation.get("parameters", ())) == path.count("{")
            if body := operation.get("requestBody"):
                schema = {"$defs": schemas, **body["content"]["application/json"]["schema"]}
                Draft202012Validator.check_schema(schema)
                validators[path] = Draft202012Validator(schema)
    assert len(set(ids)) == len(ids) and {"post_v1_chat_completions", "get_v1_models_name"} <= set(ids)
    chat = validators["/v1/chat/completions"]
    chat.validate(chat_options(TWO_CALLS, tools=TOOLS, stream=True))
    assert not chat.is_valid({"model": "scripted"}) and not chat.is_valid(chat_options(TWO_CALLS, max_tokens="many"))
    validators["/v1/messages"].validate({"model": "scripted", "max_tokens": 3, "messages": []})


@pytest.mark.parametrize(("fields", "param", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(server: RealServer, fields: dict, param: str, line: str) -> None:
    body = chat_options(TWO_CALLS, **{"max_tokens": 4, **fields})
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, param) and line in error["message"] and "\n" not in error["message"]
