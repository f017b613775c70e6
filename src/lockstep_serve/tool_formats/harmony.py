"""GPT-OSS's harmony: an answer is messages with a head each, `<|channel|>commentary to=functions.NAME ...<|message|>`.

The channel says what a message is: `analysis` is reasoning, `final` the answer, `commentary` a call, or text where it
is to nobody. The prompt ends with the first head's `<|start|>assistant`; a call ends the answer.
"""

from __future__ import annotations

import re
from typing import Literal

from lockstep_serve.tool_formats.base import ARGUMENTS, NAME, Malformed, Reading, Source, ToolFormat

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _read(source: Source) -> Reading[None]:
    head = yield from source.until(_MESSAGE)
    yield from source.follows(_MESSAGE)
    recipient = _RECIPIENT.search(head)
    if recipient is None:
        kind: Literal["reasoning", "content"] = "content"
        if f"{_CHANNEL}analysis" in head:
            kind = "reasoning"
        yield from source.passage(kind, *_ENDS, _START)
    else:
        try:
            yield source.call_name(recipient[1])
            yield from source.json("{", sends=True)
        # No such function, or no JSON: the whole message becomes content, not only its beginning.
        except Malformed:
            yield from source.passage(None, *_ENDS, _START)
            raise Malformed(source.at) from None
        yield from source.space()
    for mark in _ENDS:
        if (yield from source.follows(mark)):
            return


HARMONY = ToolFormat(
    name="harmony",
    template=(f"{_START}assistant", _CHANNEL, _MESSAGE),
    starts=(_START, _CHANNEL),
    read=_read,
    marks=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
    call=(_CHANNEL, "commentary to=functions.", NAME, " ", _CONSTRAIN, "json", _MESSAGE, ARGUMENTS),
    answer=(_CHANNEL, "final", _MESSAGE),
)
