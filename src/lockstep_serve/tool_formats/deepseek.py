"""DeepSeek V3, R1 and V3.1: calls between marks of the tokenizer's own."""

from __future__ import annotations

from lockstep_serve.tool_formats.base import ARGUMENTS, NAME, Reading, Source, ToolFormat

_CALLS = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_MARKS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)


def _read(source: Source) -> Reading[None]:
    return source.section((_CALLS, _CALLS_END), (_CALL, _CALL_END), _read_call)


def _read_call(source: Source) -> Reading[None]:
    head = yield from source.until(_SEPARATOR)
    yield from source.follows(_SEPARATOR)
    if head.strip() == "function":  # V3 and R1: the name, then JSON in a fence
        name = yield from source.until("\n")
        yield source.call_name(name.strip())
        yield from source.expect(f"{_FENCE}json")
        yield from source.json("{", sends=True)
        yield from source.expect(_FENCE)
    else:
        yield source.call_name(head.strip())
        yield from source.json("{", sends=True)


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    template=(_CALLS, "```json"),
    starts=(_CALLS,),
    read=_read,
    marks=_MARKS,
    call=(_CALL, "function", _SEPARATOR, NAME, "\n```json\n", ARGUMENTS, "\n```", _CALL_END),
    around=((_CALLS,), ("\n",), (_CALLS_END,)),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    template=(_CALLS,),
    starts=(_CALLS,),
    read=_read,
    marks=_MARKS,
    call=(_CALL, NAME, _SEPARATOR, ARGUMENTS, _CALL_END),
    around=((_CALLS,), (), (_CALLS_END,)),
)
