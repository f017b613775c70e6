"""Kimi K2: calls between marks of the tokenizer's own, each named by an id, `functions.NAME:NUMBER`."""

from __future__ import annotations

from lockstep_serve.tool_formats.base import ARGUMENTS, NAME, NUMBER, Reading, Source, ToolFormat

_CALLS = "<|tool_calls_section_begin|>"
_CALLS_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"


def _read(source: Source) -> Reading[None]:
    return source.section((_CALLS, _CALLS_END), (_CALL, _CALL_END), _read_call)


def _read_call(source: Source) -> Reading[None]:
    id = yield from source.until(_ARGUMENTS)
    yield from source.follows(_ARGUMENTS)
    yield source.call_name(id.strip().removeprefix("functions.").rpartition(":")[0])
    yield from source.json("{", sends=True)


KIMI = ToolFormat(
    name="kimi_k2",
    template=(_CALLS,),
    starts=(_CALLS,),
    read=_read,
    ends_reasoning=(_CALLS,),
    marks=(_CALLS, _CALLS_END, _CALL, _CALL_END, _ARGUMENTS),
    call=(_CALL, "functions.", NAME, ":", NUMBER, _ARGUMENTS, ARGUMENTS, _CALL_END),
    around=((_CALLS,), (), (_CALLS_END,)),
    id="functions.{name}:{number}",  # results are told apart by it, in the template
)
