"""Answers as lists of blocks (Anthropic's Messages, OpenAI's Responses), read from the stream of a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
from starlette.responses import Response

from lockstep_serve.answer_reader import AnswerReader, Part
from lockstep_serve.bodies import json_response
from lockstep_serve.openai_chat import ChatBody
from lockstep_serve.response import TokenResponse
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import AnswerDelta, Stream, StreamError


@dataclass
class Block:
    """A part of an answer: reasoning, text, or a call with its name and arguments; number: its index in the answer."""

    number: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class BlockEvent:
    """The begin or end of a block, or more text of it."""

    kind: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


def rename_param(error: StreamError, names: Mapping[str, str]) -> StreamError:
    """Return the error of a chat with its field renamed as in another API."""
    name = error.param or ""
    if name in names:
        error.param = names[name]
        if error.message.startswith(f"{name}["):  # indexes of messages may differ
            error.message = f"{names[name]}: as a chat: {error.message}"
        else:
            error.message = error.message.replace(name, names[name], 1)
    return error


def chat_form(form: Any) -> Any:
    """Return a text format as a chat's response_format, which nests the schema one level deeper."""
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
    return form


class BlockAnswer(TokenResponse):
    """The answer to a request of an API with blocks; each API overrides `value` and the events."""

    ID: ClassVar[str]  # what ids begin with
    _stream: Stream  # there always is one

    def __init__(
        self, chat: ChatBody, model: ServedModel, stream: Stream, request_id: str, with_reasoning: bool = True
    ):
        super().__init__(f"{self.ID}_{request_id}", stream, bool(chat.stream))
        self._model = model
        self._request_id = request_id
        self._with_reasoning = with_reasoning
        self._plan = stream.prompts[0].plan
        self.model = chat.model or model.name
        self.blocks: list[Block] = []
        self._open: Block | None = None

    @property
    def finish(self) -> str | None:
        return self._stream.choices[0].finish

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    def value(self) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def block_events(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        """Return the API's events for one of a block."""
        raise NotImplementedError

    def closing(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def failing(self, error: StreamError) -> dict[str, Any]:
        """Return the event of an answer that fails after its first event."""
        raise NotImplementedError

    async def full_response(self) -> Response:
        async for _ in self._stream:
            pass
        # Use the reader of streams, so that whole answers have the same blocks.
        reader = self._plan.reader()
        for part in [*reader.push(self._stream.choices[0].text), *reader.finish()]:
            list(self._add(part))
        self._count_calls(reader)
        return json_response(self.value())

    async def events(self) -> AsyncIterator[bytes]:
        reader = self._plan.reader()
        try:
            yield _encoded(self.opening())
            async for deltas in self._stream:
                for delta in deltas:
                    events = self._delta_events(reader, delta)
                    if events:
                        yield _encoded(events)
            self._count_calls(reader)
            yield _encoded(self.closing())
        # Status 200 was sent before the first event, so the error is an event too.
        except StreamError as error:
            yield _encoded([self.failing(error)])

    def _delta_events(self, reader: AnswerReader, delta: AnswerDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        parts = reader.push(delta.text)
        if delta.finish:
            parts += reader.finish()
        # The API's events show a block's text so far, so they are encoded before the block grows.
        for part in parts:
            for event in self._add(part):
                events += self.block_events(event)
        if delta.finish:
            for event in self._end():
                events += self.block_events(event)
        return events

    def _count_calls(self, reader: AnswerReader) -> None:
        self._model.metrics.called(reader.num_calls, reader.num_malformed)

    def _add(self, part: Part) -> Iterator[BlockEvent]:
        if part.kind == "reasoning" and not self._with_reasoning:
            return
        if part.kind == "name":
            call_id = self._plan.call_id(f"{self._request_id}/0", part.call, part.text)
            yield from self._begin(Block(len(self.blocks), "call", name=part.text, call_id=call_id))
            return
        kind: Literal["reasoning", "text", "call"] = "text"
        if part.kind == "arguments":
            kind = "call"
        elif part.kind == "reasoning":
            kind = "reasoning"
        text = part.text
        if self._open is None or self._open.kind != kind:
            # Models write blank lines between reasoning, text and calls; these alone make no block.
            if self.blocks and not (text := text.lstrip()):
                return
            yield from self._begin(Block(len(self.blocks), kind))
        assert self._open is not None
        self._open.text += text
        yield BlockEvent("more", self._open, text)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._end()
        self._open = block
        self.blocks.append(block)
        yield BlockEvent("begin", block)

    def _end(self) -> Iterator[BlockEvent]:
        block = self._open
        self._open = None
        if block is not None:
            yield BlockEvent("end", block)


def _encoded(events: Any) -> bytes:
    """Return server-sent events, each with its type as its name."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events
    )
