"""GLM 4.5 and Qwen3-Coder: calls whose arguments stand each between tags of its own."""

from __future__ import annotations

import json
from typing import Any

from lockstep.serve.tool_formats.base import (
    ARGUMENTS,
    KEY,
    NAME,
    VALUE,
    Event,
    Malformed,
    Reading,
    Source,
    ToolFormat,
    decoded,
    is_text,
)

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _value(text: str) -> Any:
    """Return an argument: JSON where it is, else the text; a number of which the function wants a text is one."""
    try:
        return decoded(text)
    except Malformed:
        return text


def _read_glm(source: Source) -> Reading[None]:
    yield from source.expect(_BEGIN)
    name = yield from source.until(_KEY, _END)
    yield Event("name", source.known(name.strip()))
    arguments: dict[str, Any] = {}
    while (yield from source.follows(_KEY)):
        key = yield from source.until(_KEY_END)
        yield from source.expect(_KEY_END)
        yield from source.expect(_VALUE)
        value = yield from source.until(_VALUE_END)
        yield from source.expect(_VALUE_END)
        _add(source, name.strip(), arguments, key.strip(), value)
        yield from source.space()
    yield Event("arguments", json.dumps(arguments, ensure_ascii=False))
    yield from source.expect(_END)


def _read_qwen(source: Source) -> Reading[None]:
    yield from source.expect(_BEGIN)
    yield from source.expect(_FUNCTION)
    name = yield from source.until(">")
    yield Event("name", source.known(name.strip()))
    yield from source.expect(">")
    arguments: dict[str, Any] = {}
    yield from source.space()
    while (yield from source.follows(_PARAMETER)):
        key = yield from source.until(">")
        yield from source.expect(">")
        value = yield from source.until(_PARAMETER_END)
        yield from source.expect(_PARAMETER_END)
        # A line's end on both sides belongs to the tags.
        _add(source, name.strip(), arguments, key.strip(), value.removeprefix("\n").removesuffix("\n"))
        yield from source.space()
    yield Event("arguments", json.dumps(arguments, ensure_ascii=False))
    yield from source.expect(_FUNCTION_END)
    yield from source.close(_END)


def _add(source: Source, function: str, arguments: dict[str, Any], key: str, text: str) -> None:
    if not key or key in arguments:
        raise Malformed
    arguments[key] = text if is_text(source.tools[function], key) else _value(text)


GLM = ToolFormat(
    name="glm",
    template=(_KEY,),
    starts=(_BEGIN,),
    read=_read_glm,
    marks=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
    call=(_BEGIN, NAME, "\n", ARGUMENTS, _END),
    around=((), ("\n",), ()),
    argument=(_KEY, KEY, _KEY_END, "\n", _VALUE, VALUE, _VALUE_END, "\n"),
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    template=(_FUNCTION, _PARAMETER),
    starts=(_BEGIN,),
    read=_read_qwen,
    marks=(_BEGIN, _END),
    call=(_BEGIN, f"\n{_FUNCTION}", NAME, ">\n", ARGUMENTS, f"{_FUNCTION_END}\n", _END),
    around=((), ("\n",), ()),
    argument=(_PARAMETER, KEY, ">\n", VALUE, f"\n{_PARAMETER_END}\n"),
)
