"""A process that renders a chat template, with limits of time and memory.

`python -m lockstep_serve.template_process`, frames on stdin and stdout.

A template is a program by whoever published the checkpoint. Jinja's sandbox hides Python's attributes, but does not
stop endless loops, or numbers and texts that fill the memory, and one expression may hold the interpreter for ever: no
thread could be stopped. A process can: the kernel kills this one after `CPU_SECONDS` of CPU time for a frame, and its
memory and the files that it may write are limited.

A frame is a length (big-endian, 32 bits) and JSON: first the template, then messages. The answer to each is {"text"} or
{"error"}, a line.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEADER = struct.Struct(">I")
CPU_SECONDS = 2.0
MEMORY = 512 << 20  # bytes of address space more than at the start
_EXTRA_CHARACTERS = 1 << 20  # of a prompt, beyond twice those of its frame
_MAX_ERROR = 300  # characters
_MARK = "<|the final message ends here|> "  # a template that trims messages removes the space


class TooLong(Exception):
    """The error of a prompt that grows far beyond its messages."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training, and is only a scope here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _PlainNamespace(Namespace):
    """Jinja's `namespace` without attributes that begin with "_": Python's own do."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        super().__init__(values)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"namespace: expected a name without _ before it, found {name!r}")
        super().__setitem__(name, value)


def environment() -> jinja2.Environment:
    """Return Jinja's environment as transformers makes it: white space, extensions, filters, functions."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _to_json
    env.tests["none"] = _is_none
    env.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _PlainNamespace,
    }
    return env


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, _Null)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the escapes of HTML that Jinja's own filter makes."""

    def default(other: Any) -> Any:
        if isinstance(other, _Null):
            return None
        return json.JSONEncoder().default(other)

    return json.dumps(
        value, default=default, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def rendered(template: jinja2.Template, tokens: Mapping[str, str], chat: Mapping[str, Any], limit: int) -> str:
    """Return the prompt of a chat. Raises what the template raises, TemplateError, and TooLong above `limit`."""
    messages = [_with_null(_with_arguments(_with_reasoning(message))) for message in chat["messages"]]
    final = ""
    if chat["continues"]:
        final = messages[-1]["content"]
        messages[-1] = {**messages[-1], "content": final + _MARK}
    variables = {"tools": None, "documents": None, **tokens, **chat["variables"], "messages": messages}
    pieces = []
    length = 0
    for piece in template.generate(**variables, add_generation_prompt=chat["add_generation_prompt"]):
        length += len(piece)
        if length > limit:
            raise TooLong
        pieces.append(piece)
    text = "".join(pieces)
    return _cut_at_mark(text, final) if chat["continues"] else text


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning under both names that templates know."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Null(jinja2.Undefined):
    """A content of null: a template's `is none` holds, and its text is empty, as in transformers 5."""

    def __eq__(self, other: Any) -> bool:
        return other is None or super().__eq__(other)

    __hash__ = jinja2.Undefined.__hash__


def _with_null(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with `_Null` as content where that is null."""
    if message.get("content", "") is not None:
        return message
    return {**message, "content": _Null(name="content")}


class _Arguments(dict):
    """Arguments of a tool call: an object for templates with `tojson`, the client's text for those that print it."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with `_Arguments` in its tool calls, where a client sent a text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    return {**call, "function": {**function, "arguments": _Arguments(json.loads(text), text)}}


def _cut_at_mark(text: str, final: str) -> str:
    """Return `text` up to its final message's end, trimmed if the template trims. Raises TemplateError."""
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark or final.strip() not in before:
        raise TemplateError("the chat template leaves out the final message, or changes it: it cannot be continued")
    if not after.startswith(" "):
        before = before.rstrip()
    return before


def _answer(state: dict[str, Any], frame: Mapping[str, Any], limit: int) -> dict[str, str]:
    try:
        if "template" in frame:
            state["tokens"] = frame["special_tokens"]
            state["template"] = environment().from_string(frame["template"])
            return {"text": ""}
        return {"text": rendered(state["template"], state["tokens"], frame, limit)}
    except TemplateSyntaxError as error:
        return {"error": _line(f"line {error.lineno}: {error.message}")}
    except TooLong:
        return {"error": f"a prompt of more than {limit} characters"}
    except MemoryError:
        return {"error": f"more than {MEMORY >> 20} MiB of memory"}
    except TemplateError as error:
        return {"error": _line(str(error))}
    except Exception as error:  # any error of an expression of the template
        return {"error": _line(f"{type(error).__name__}: {error}")}


def _line(message: str) -> str:
    line = " ".join(message.split())
    if len(line) > _MAX_ERROR:
        line = f"{line[: _MAX_ERROR - 3]}..."
    return line


def _limit() -> None:
    # In pages. The limit is on top of the address space that Python and Jinja use already.
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    for kind, limit in ((resource.RLIMIT_AS, used + MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Answer frames until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the API process ends this one
        signal.signal(number, signal.SIG_IGN)
    # The default kills the process; a handler in Python would wait for the expression that never ends.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit()
    state: dict[str, Any] = {}
    while head := sys.stdin.buffer.read(HEADER.size):
        data = sys.stdin.buffer.read(HEADER.unpack(head)[0])
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = json.dumps(_answer(state, json.loads(data), 2 * len(data) + _EXTRA_CHARACTERS)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(HEADER.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
