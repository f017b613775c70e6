"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`; Granite 4 writes as Hermes does."""

from __future__ import annotations

from lockstep.serve.tool_formats.base import ARGUMENTS, NAME, Reading, Source, ToolFormat

_BEGIN = "<|tool_call|>"


def _read(source: Source) -> Reading[None]:
    yield from source.expect(_BEGIN)
    yield from source.call_list()


GRANITE = ToolFormat(
    name="granite",
    template=(_BEGIN,),
    starts=(_BEGIN,),
    read=_read,
    marks=(_BEGIN,),
    call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
    around=((_BEGIN, "["), (", ",), ("]",)),
)
