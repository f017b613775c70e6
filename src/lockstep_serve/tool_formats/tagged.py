"""GLM 4.5, Qwen3-Coder and Seed-OSS: calls with a pair of tags around each argument."""

from __future__ import annotations

import functools
from typing import Any

from lockstep_serve.tool_formats.arguments import coerced, dumped
from lockstep_serve.tool_formats.base import ARGUMENTS, KEY, NAME, VALUE, Event, Malformed, Reading, Source, ToolFormat

_BEGIN = "<tool_call>"
_END = "</tool_call>"
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_SEED = "<seed:tool_call>"
_SEED_END = "</seed:tool_call>"


def _read_glm(source: Source) -> Reading[None]:
    yield from source.expect(_BEGIN)
    name = yield from source.until(_KEY, _END)
    yield source.call_name(name.strip())
    arguments: dict[str, Any] = {}
    while (yield from source.follows(_KEY)):
        key = yield from source.until(_KEY_END)
        yield from source.expect(_KEY_END)
        yield from source.expect(_VALUE)
        value = yield from source.until(_VALUE_END)
        yield from source.expect(_VALUE_END)
        _add(source, name.strip(), arguments, key.strip(), value)
        yield from source.space()
    yield Event("arguments", dumped(arguments))
    yield from source.expect(_END)


def _read_function_call(source: Source, begin: str, end: str) -> Reading[None]:
    is_marked = yield from source.follows(begin)  # Qwen3-Coder often leaves it out
    yield from source.expect(_FUNCTION)
    head = source.at
    try:
        yield from _read_function(source)
    except Malformed:
        raise Malformed(head) from None  # so that the name does not begin another call
    if is_marked:
        yield from source.close(end)
    else:
        yield from source.space()
        yield from source.follows(end)


def _read_function(source: Source) -> Reading[None]:
    name = yield from source.until(">")
    yield source.call_name(name.strip())
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
    yield Event("arguments", dumped(arguments))
    yield from source.expect(_FUNCTION_END)


def _add(source: Source, function: str, arguments: dict[str, Any], key: str, text: str) -> None:
    if not key or key in arguments:
        raise Malformed
    arguments[key] = coerced(text, source.tools[function], key)


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
    starts=(_BEGIN, _FUNCTION),
    read=functools.partial(_read_function_call, begin=_BEGIN, end=_END),
    ends_reasoning=(f"{_BEGIN}\n{_FUNCTION}",),
    marks=(_BEGIN, _END),
    call=(_BEGIN, f"\n{_FUNCTION}", NAME, ">\n", ARGUMENTS, f"{_FUNCTION_END}\n", _END),
    around=((), ("\n",), ()),
    argument=(_PARAMETER, KEY, ">\n", VALUE, f"\n{_PARAMETER_END}\n"),
)
SEED = ToolFormat(
    name="seed_oss",
    template=(_SEED,),
    starts=(_SEED,),
    read=functools.partial(_read_function_call, begin=_SEED, end=_SEED_END),
    marks=(_SEED, _SEED_END),
    call=(_SEED, f"\n{_FUNCTION}", NAME, ">\n", ARGUMENTS, f"{_FUNCTION_END}\n", _SEED_END),
    around=((), ("\n",), ()),
    argument=(_PARAMETER, KEY, ">", VALUE, f"{_PARAMETER_END}\n"),
)
