"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, later `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

from lockstep_serve.tool_formats.base import ARGUMENTS, NAME, Reading, Source, ToolFormat

_BEGIN = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_ID = "[CALL_ID]"


def _read(source: Source) -> Reading[None]:
    yield from source.expect(_BEGIN)
    yield from source.space()
    while source.at == len(source.text):
        yield from source.wait()
    if source.text[source.at] == "[":
        return (yield from source.call_list())
    # The newer form; the id after the name and [ARGS] are optional.
    name = yield from source.until("{", _ARGS, _ID)
    yield source.call_name(name.strip())
    if (yield from source.follows(_ID)):
        yield from source.until(_ARGS)
    yield from source.follows(_ARGS)
    yield from source.json("{", sends=True)


MISTRAL = ToolFormat(
    name="mistral",
    template=(_BEGIN,),
    starts=(_BEGIN,),
    read=_read,
    marks=(_BEGIN,),
    call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
    around=((_BEGIN, "["), (", ",), ("]",)),
    id_length=9,  # Mistral's templates take no other
)
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    template=(_BEGIN, _ARGS),
    starts=(_BEGIN,),
    read=_read,
    marks=(_BEGIN, _ARGS),
    call=(_BEGIN, NAME, _ARGS, ARGUMENTS),
    id_length=9,
)
