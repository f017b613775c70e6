"""Chat templates in a server: rendered as transformers does; hostile ones end with one line, and hold nobody up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest
import uvloop
from demo_model import DEMO
from transformers import PreTrainedTokenizerFast

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep_serve.bodies import BadRequest
from lockstep_serve.chat import Chat, ChatError
from lockstep_serve.messages import template_messages
from lockstep_serve.stream import StreamError
from some import some, some_cases

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
LLAMA_2 = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set head = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set head = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant must take turns') }}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + (head if loop.first else '') + message['content'] | trim + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""
CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are a helper.<|im_end|>
    {% endif %}
    {% if message.role == 'assistant' %}{% generation %}
{% set said = message.content %}
<|im_start|>{{ message.role }}
{{ said }}<|im_end|>
{% endgeneration %}{% else %}
<|im_start|>{{ message.role }}{{ ' ' ~ said if said is defined }}
{{ message['content'] }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if thinks is defined and not thinks %}<think></think>{% endif %}
{% endif %}
"""
TOOLS = """\
{%- set ns = namespace(last=-1, seen=false) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro called(call) -%}
<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>
{%- endmacro -%}
{{- '# Tools\\n' + (tools or []) | tojson(indent=2) }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
{{ called(call) }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
<answer id="{{ message.tool_call_id }}">{{ message.content }}</answer>
    {%- else %}
{{ message.role | upper }}: {{ message.content }}{{ '!' if loop.index0 == ns.last }}
{{- (' (' ~ message.reasoning_content ~ ')') if message.reasoning_content and message.thinking }}
    {%- endif %}
    {%- if loop.index > 7 %}{% break %}{% endif %}
{%- endfor %}
{{ bos_token }}{{ pad_token }}{{ strftime_now('%Y') | length }}
"""
CHAT = [
    {"role": "user", "content": " Grüße <b> & 'quotes'\n"},
    {"role": "assistant", "content": "Yes. "},
    {"role": "user", "content": "日本 🙂"},
]
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": {"b": "Zürich", "a": [1, None]}}}]},
    {"role": "tool", "tool_call_id": "7", "content": "rain"},
    {"role": "assistant", "content": "Rain.", "reasoning": "it said so"},
]
SYSTEM = [{"role": "system", "content": "Be brief. "}, *CHAT]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, *arguments: Any) -> str:
    """By the process that a server has."""

    async def ask() -> str:
        chat = Chat(ChatTemplate(template, TOKENS))
        await chat.start()
        try:
            return await chat.render(*arguments)
        finally:
            await chat.stop()

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"), **TOKENS)


@pytest.mark.parametrize("name", ["LLAMA_2", "CHATML", "TOOLS"])
@pytest.mark.parametrize(
    "messages", some([CHAT, CHAT[:1], SYSTEM, CALLED], CALLED), ids=["chat", "first", "system", "called"]
)
def test_a_prompt_is_that_of_transformers(theirs: Any, name: str, messages: list) -> None:
    if name != "TOOLS" and messages is CALLED:
        messages = CALLED[-1:] if name == "CHATML" else CALLED[:2]
    template = globals()[name]
    for opens, variables in ((False, {}), (True, {"thinks": False, "bos_token": "<other>"})):
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=opens, **variables
        )
        assert render(template, messages, opens, False, variables) == expected != ""


@pytest.mark.parametrize("name", ["LLAMA_2", "CHATML"])
def test_a_final_message_is_continued_as_in_transformers(theirs: Any, name: str) -> None:
    for messages in (CHAT[:2], SYSTEM[:3], [CHAT[0], {"role": "assistant", "content": "Yes"}]):
        expected = theirs.apply_chat_template(
            messages, chat_template=globals()[name], tokenize=False, continue_final_message=True
        )
        actual = render(globals()[name], messages, False, True)
        assert actual == expected and actual.rstrip().endswith("Yes" if messages[-1]["content"] == "Yes" else "Yes.")
    with pytest.raises(ChatError, match="leaves out the final message"):
        render("content", CHAT, False, True)


NULL = """\
{%- for message in messages -%}
    {%- if message.content is none -%}<calls>{{ message.tool_calls[0].function.name }}
    {%- elif message.content is string -%}{{ message.content }}
    {%- endif -%}
{%- endfor -%}
"""
# Templates that write the arguments as a text, and that take them as an object.
AS_TEXT = (
    "{{ call.arguments }}",
    "{{ 'a' + call.arguments + 'b' }}",
    "{{ 'a' ~ call.arguments }}",
    "{{ call.arguments | trim }}",
)
AS_OBJECT = (
    "{{ call.arguments | tojson }}",
    "{{ call | tojson }}",
    "{% for name, value in call.arguments.items() %}{{ name }}={{ value | tojson }};{% endfor %}",
    "{{ call.arguments if call.arguments is string else call.arguments | tojson(indent=2) }}",
    "{{ call.arguments is mapping }}{{ call.arguments.b }}{{ call.arguments | length }}",
)


def called(arguments: Any, **options: Any) -> list[dict]:
    function = {"name": "w", "arguments": arguments}
    return [CALLED[1], {"role": "assistant", "tool_calls": [{"id": "7", "function": function}], **options}]


@pytest.mark.parametrize(
    "test", ["message.content is none", "message['content'] == none", "not message.content is not none"]
)
def test_a_content_of_null_is_none_where_the_template_asks(test: str) -> None:
    """As DeepSeek's does: if it is undefined, such a template leaves out the call without a word."""
    template = NULL.replace("message.content is none", test)
    assert render(template, template_messages(called("{}", content=None))) == "Weather?<calls>w"
    assert render(template, template_messages(called("{}", content="so"))) == "Weather?so"
    assert "content" not in template_messages(called("{}"))[1]


@pytest.mark.parametrize("name", ["CHATML", "TOOLS"])
@pytest.mark.parametrize("inner", ["", "{{ messages[1].content | trim }}{{ messages[1].content is defined }}"])
def test_a_content_of_null_is_written_as_transformers_writes_it(theirs: Any, name: str, inner: str) -> None:
    """It never says "None"."""
    messages = called({"a": 1}, content=None)
    template = globals()[name] + inner
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert render(template, template_messages(messages), False) == expected and "None" not in expected
    assert '"content": null' in render("{{ messages | tojson }}", template_messages(messages))


@pytest.mark.parametrize("inner", some([*AS_TEXT, *AS_OBJECT], AS_TEXT[0], AS_OBJECT[0]))
def test_arguments_are_what_the_template_wants(theirs: Any, inner: str) -> None:
    """The client's text to the byte, or the object that it represents."""
    template = "{% for call in messages[1].tool_calls %}{% set call = call.function %}" + inner + "{% endfor %}"
    text = '{"b":  "Zürich",\n "a": [1, null]}'
    arguments_seen = called(text if inner in AS_TEXT else json.loads(text))
    expected = theirs.apply_chat_template(arguments_seen, chat_template=template, tokenize=False)
    assert render(template, template_messages(called(text))) == expected
    if inner in AS_OBJECT:  # a client may send the object itself
        assert render(template, template_messages(arguments_seen)) == expected


def test_arguments_that_are_no_object_are_refused() -> None:
    for text in ('"x"', "[1]", "7"):
        with pytest.raises(BadRequest, match=r"tool_calls\[0\].function.arguments: expected JSON of an object"):
            template_messages(called(text))
    assert render("{{ messages[1].tool_calls[0].function.arguments }}", template_messages(called(""))) == "{}"
    assert render("{{ messages[1].tool_calls[0].function.arguments }}", template_messages(called("null"))) == "{}"


def test_what_a_template_says_of_the_messages_is_the_line() -> None:
    with pytest.raises(ChatError, match="^user and assistant must take turns$"):
        render(LLAMA_2, CHAT[1:])


HOSTILE = {
    "a loop without an end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{% set n = messages | length %}{{ (n + 9) ** 999999999 }}",
    "a power when it is compiled": "{{ 9 ** 999999999 }}", "a long text when it is compiled": "{{ 'x' * 99999999999 }}",
    "a long text": "{{ messages[0].role * 9999999999 }}",
    "a long text in pieces": "{% for a in range(99999) %}{{ messages[0].role * 999 }}{% endfor %}",
    "a large range": "{{ range(10 ** 9) | list }}",
    "a deep recursion": "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "attributes of a namespace": "{{ namespace(__class__=1) }}",
    "a format string": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "a change of the messages": "{{ messages.append(1) }}", "another template": "{% include '/etc/passwd' %}",
    "no syntax": "{% for message in %}", "an unknown tag": "{% exec 'x' %}",
}  # fmt: skip


ALWAYS = ("a loop without an end", "attributes", "no syntax")


@pytest.mark.parametrize("template", some_cases(HOSTILE, *ALWAYS))
def test_a_hostile_template_ends_with_one_line_and_holds_nobody_up(template: str, capfd: Any) -> None:
    async def tried() -> tuple[str, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        beside = asyncio.create_task(tick())
        chat = Chat(ChatTemplate(template, {}))
        await chat.start()
        with pytest.raises(ChatError) as caught:
            await chat.render(CHAT)
        beside.cancel()
        await chat.stop()
        return str(caught.value), ticks

    line, ticks = asyncio.run(tried())
    assert line and "\n" not in line and len(line) < 400
    assert "root:" not in line and "subclass" not in line.replace("__subclasses__", "")
    assert ticks > 1  # the loop went on meanwhile: a start of the process alone takes as long as that
    output = capfd.readouterr().err
    assert output.count("\n") <= 1 and (not output or output.startswith("no chat: "))


def test_who_leaves_takes_the_process_from_nobody() -> None:
    """Neither while the chat is rendered nor while it waits for its turn; its answer is no other chat's."""

    async def ask() -> tuple[list[str], bool]:
        chat = Chat(
            ChatTemplate(PLAIN + "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}", {})
        )
        await chat.start()
        process = chat.process
        leaving = [asyncio.create_task(chat.render(CHAT[2:])) for _ in range(3)]
        staying = [asyncio.create_task(chat.render(CHAT[:count])) for count in (1, 2)]
        await asyncio.sleep(0.02)
        for task in leaving:
            task.cancel()
        texts = await asyncio.gather(*staying)
        same = chat.process is process
        await chat.stop()
        assert all(task.cancelled() for task in leaving)
        return texts, same

    texts, same = asyncio.run(ask())
    first, second, _ = (message["content"] for message in CHAT)
    assert same and texts == [first, first + second]


@pytest.mark.long
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_process_that_is_gone_is_started_again_and_one_that_hangs_is_no_mistake_of_the_chat(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> tuple[str, StreamError]:
        chat = Chat(ChatTemplate(PLAIN, {}))
        await chat.start()
        killed = chat.process
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
        await killed.wait()
        await asyncio.sleep(0.1)
        text = await chat.render(CHAT[:1])
        assert chat.process is not None
        os.kill(chat.process.pid, signal.SIGSTOP)
        monkeypatch.setattr("lockstep_serve.chat.RENDER_TIMEOUT_S", 0.5)
        with pytest.raises(StreamError, match="^the process of the chat template: no answer within 0.5 s") as caught:
            await chat.render(CHAT[:1])
        monkeypatch.undo()
        assert await chat.render(CHAT[:1]) == text
        await chat.stop()
        return text, caught.value

    run = uvloop.run if loop == "uvloop" else asyncio.run
    text, error = run(ask())
    assert text == CHAT[0]["content"] and (error.status, error.code) == (500, "template_error")


def test_a_process_that_dies_at_a_chat_again_and_again_is_an_error_of_the_server() -> None:
    template = PLAIN + "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"

    async def ask() -> StreamError:
        chat = Chat(ChatTemplate(template, {}))
        await chat.start()
        asking = asyncio.create_task(chat.render(CHAT[:1]))
        killed: set[int] = set()
        while not asking.done():
            await asyncio.sleep(0.2)
            if (process := chat.process) is not None and process.pid not in killed:
                killed.add(process.pid)
                os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(StreamError, match="it ended with code -9; try again") as caught:
            await asking
        await chat.stop()
        return caught.value

    assert asyncio.run(ask()).status == 500


def test_without_a_template_there_is_no_process_and_no_chat() -> None:
    async def ask() -> None:
        chat = Chat(None)
        await chat.start()
        with pytest.raises(ChatError, match="no chat template"):
            await chat.render(CHAT)
        await chat.stop()

    asyncio.run(ask())
