"""A client for the server's own checks: completions over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import CheckError


@dataclass
class Answer:
    """A stream's token ids, their log-probabilities where asked for, its text, and why it ended."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


async def get(path: Path, url: str) -> Any:
    """Return the JSON at `url`. Raises CheckError for another status than 200."""
    return await _json(path, url, f"GET {url} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())


async def post(path: Path, url: str, body: Mapping[str, Any], request_id: str) -> Any:
    """Return the JSON that a body is answered with. Raises CheckError for another status than 200."""
    data = json.dumps(body).encode()
    head = f"POST {url} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {request_id}\r\n"
    return await _json(path, url, head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)


async def _json(path: Path, url: str, request: bytes) -> Any:
    async with _asked(path, request) as reader:
        return json.loads(b"".join([part async for part in _body(reader, url)]))


async def complete(path: Path, body: Mapping[str, Any], leave_after: int | None = None) -> AsyncIterator[Answer]:
    """Send one completion; yield the answer so far at each event, `leave_after` at most. Raises CheckError."""
    data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    answer, pieces, rest = Answer(), 0, b""
    async with _asked(path, head.encode() + data) as reader:
        if leave_after == 0:
            return
        async for part in _body(reader, "completion"):
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    return
                _add(answer, json.loads(event.removeprefix(b"data: ")))
                pieces += 1
                yield answer
                if pieces == leave_after:
                    return
    raise CheckError(f"completion: expected its end, found that the stream ends behind {len(answer.token_ids)} tokens")


def _add(answer: Answer, event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise CheckError(f"completion: {event['error']['message']}")
    (choice,) = event["choices"]
    answer.token_ids += choice["token_ids"]
    answer.text += choice["text"]
    answer.finish = choice["finish_reason"]
    if choice["logprobs"]:
        answer.logprobs += choice["logprobs"]["token_logprobs"]


@contextlib.asynccontextmanager
async def _asked(path: Path, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(request)
        yield reader
    finally:
        writer.transport.abort()


async def _body(reader: asyncio.StreamReader, what: str) -> AsyncIterator[bytes]:
    """Yield the parts of an answer's body. Raises CheckError for no success."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = head.partition("\r\n")[0].split()[1]
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if "content-length" in headers:
            data = await reader.readexactly(int(headers["content-length"]))
            if status != "200":
                raise CheckError(f"{what}: expected status 200, found {status}: {data.decode()[:300]}")
            yield data
            return
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        raise CheckError(f"{what}: expected a whole answer, found that the connection broke off") from None
