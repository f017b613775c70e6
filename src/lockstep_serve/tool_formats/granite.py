"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`, and Phi 4 with an end mark; Granite 4 is Hermes'."""

from __future__ import annotations

from lockstep_serve.tool_formats.base import ARGUMENTS, NAME, Reading, Source, ToolFormat

_BEGIN = "<|tool_call|>"
_END = "<|/tool_call|>"


def _read(source: Source) -> Reading[None]:
    yield from source.expect(_BEGIN)
    yield from source.call_list()
    # Phi 4's; Granite has no end mark.
    yield from source.follows(_END)


GRANITE = ToolFormat(
    name="granite",
    template=(_BEGIN,),
    starts=(_BEGIN,),
    read=_read,
    marks=(_BEGIN, _END),
    call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
    around=((_BEGIN, "["), (", ",), ("]",)),
)
