"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; SmolLM2 writes a list between them."""

from __future__ import annotations

from lockstep_serve.tool_formats.base import ARGUMENTS, NAME, Reading, Source, ToolFormat

_BEGIN = "<tool_call>"
_END = "</tool_call>"


def _read(source: Source) -> Reading[None]:
    yield from source.expect(_BEGIN)
    yield from source.call_or_list()
    yield from source.close(_END)


HERMES = ToolFormat(
    name="hermes",
    template=(_BEGIN,),
    starts=(_BEGIN,),
    read=_read,
    marks=(_BEGIN, _END),
    call=(_BEGIN, '\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n", _END),
    around=((), ("\n",), ()),
)
