"""JSON as the whole answer: a plain convention for models without one, and Llama 3's."""

from __future__ import annotations

from lockstep_serve.tool_formats.base import ARGUMENTS, NAME, Reading, Source, ToolFormat

_TAG = "<|python_tag|>"


def _read_one_or_list(source: Source) -> Reading[None]:
    yield from source.call_or_list()
    yield from source.finish()  # text after JSON is an answer about JSON, and no call


def _read_llama(source: Source) -> Reading[None]:
    yield from source.follows(_TAG)
    while True:
        yield from source.space()
        yield from source.call_object()
        yield from source.space()
        if not (yield from source.follows(";")):
            break
    yield from source.finish()  # text after JSON is an answer about JSON, and no call


JSON = ToolFormat(
    name="json",
    template=(),
    starts=(),
    read=_read_one_or_list,
    opening="{[",
    call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
    around=(("[",), (", ",), ("]",)),
    instructs=True,
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    template=("<|start_header_id|>", '"parameters"'),
    starts=(_TAG,),
    read=_read_llama,
    opening="{",
    marks=(_TAG,),
    call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
    around=((), ("; ",), ()),
)
