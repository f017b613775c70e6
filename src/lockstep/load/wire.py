"""OpenAI's wire format: a prompt becomes the body of a request, and an answer a record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.errors import InputError
from lockstep.load.http import Answer
from lockstep.load.records import COMPLETED, FAILED, REFUSED, Prompt, Record

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSALS = (429, 503)  # the queue is full; the server drains or is not ready
_MOST_BODY = 64 << 20  # bytes of an answer that is no stream


def body(prompt: Prompt, endpoint: str, model: str, extra: Mapping[str, Any], stream: bool = True) -> bytes:
    """Return a request's body; extra: fields added or replaced. Raises InputError for a prompt it cannot take."""
    content = prompt.content
    asked = {"model": model, "max_tokens": prompt.max_tokens, "temperature": 0}
    is_chat = isinstance(content, list) and isinstance(content[0], dict)
    if endpoint == "chat":
        if isinstance(content, list) and not is_chat:
            raise InputError(
                "--endpoint chat: expected prompts that are text or messages, found token ids; "
                "give a --dataset of texts, or take --endpoint completions"
            )
        asked["messages"] = content if is_chat else [{"role": "user", "content": content}]
    elif is_chat:
        raise InputError(
            "--endpoint completions: expected prompts that are text or token ids, found messages; add --endpoint chat"
        )
    else:
        asked["prompt"] = content
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**asked, **extra}).encode()


class EventReader:
    """A reader of server-sent events (html.spec.whatwg.org); what is not whole yet stays for the next call."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `data` ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))


class Reader:
    """A reader that fills a record; start: the clock at the run's start. stream: the answer comes in events."""

    def __init__(self, record: Record, start: float, stream: bool) -> None:
        self._record = record
        self._start = start
        self._stream = stream
        self._events = EventReader()
        self._body = bytearray()  # of an answer that is no stream

    def piece(self, answer: Answer, data: bytes, now: float) -> None:
        """Take a piece of the body, read from the socket at the clock `now`."""
        self._record.end = now - self._start
        if "text/event-stream" not in answer.headers.get("content-type", ""):
            self._body += data[: _MOST_BODY - len(self._body)]
            return
        for event in self._events.feed(data):
            self._event(event, now)

    def end(self, answer: Answer) -> None:
        """Judge the whole answer: its status and error go into the record."""
        record = self._record
        record.http_status = answer.status
        if answer.status != 200:
            record.status = REFUSED if answer.status in REFUSALS else FAILED
            record.error = f"HTTP {answer.status}: {said(bytes(self._body))}"
        else:
            if not self._stream:  # it is as an event that holds all
                self._event(bytes(self._body), self._start + (record.end or 0.0))
            self._judge()

    def _event(self, event: bytes, now: float) -> None:
        """Take the data of an event that came at the clock `now`."""
        raise NotImplementedError  # each wire format has its own

    def _judge(self) -> None:
        """Judge an answer that came to its end."""
        raise NotImplementedError  # as above


class StreamReader(Reader):
    """A reader of OpenAI's events."""

    def __init__(self, record: Record, start: float, stream: bool) -> None:
        super().__init__(record, start, stream)
        self._is_whole = not stream

    def _event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._is_whole = True
            return
        try:
            self._take(json.loads(event), now)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            self._record.error = f"expected an event of OpenAI's format, found {quoted(event)}"

    def _take(self, event: dict[str, Any], now: float) -> None:
        record = self._record
        if event.get("error"):
            record.error = error_line(event)
        if usage := event.get("usage"):
            record.input_tokens = usage["prompt_tokens"]
            record.output_tokens = usage.get("completion_tokens", 0)
        for choice in event.get("choices") or ():
            if text := _text(choice):
                record.chunks.append(now - self._start)
                record.text += text
            record.finish_reason = choice.get("finish_reason") or record.finish_reason

    def _judge(self) -> None:
        record = self._record
        if record.error is None and not self._is_whole:
            record.error = "expected a stream of events that ends in [DONE], found one that ends without it"
        elif record.error is None and record.output_tokens is None:
            record.error = "expected the server to send `usage` (stream_options.include_usage), found none"
        elif record.error is None:
            record.status = COMPLETED


def error_line(value: Any) -> str:
    """Return the message of an error, in OpenAI's or vLLM's older format, as one line."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, streamed or whole; a chat's first event has none."""
    part = choice.get("delta") or choice.get("message")
    if part is None:
        return choice.get("text") or ""
    return (part.get("reasoning_content") or "") + (part.get("content") or "")


def said(data: bytes) -> str:
    """Return the error in the body of a refusal, as one line."""
    try:
        return error_line(json.loads(data))
    except ValueError:
        return quoted(data)


def quoted(data: bytes) -> str:
    """Return the beginning of an answer's bytes, as one line."""
    text = " ".join(data.decode("utf-8", "replace").split())
    return repr(text if len(text) <= 100 else f"{text[:97]}...") if text else "nothing"
