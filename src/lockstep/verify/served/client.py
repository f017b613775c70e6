"""A client for the check `served`: completions and chats over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import CheckError
from lockstep.verify.sampled.answer import Answer


async def get(path: Path, url: str) -> Any:
    """Return the JSON at `url`. Raises CheckError for another status than 200."""
    return await _json(path, url, f"GET {url} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())


async def post(path: Path, url: str, body: Mapping[str, Any], request_id: str) -> Any:
    """Return the JSON answer to a body. Raises CheckError for another status than 200."""
    return await _json(path, url, _post(url, body, f"X-Request-Id: {request_id}"))


async def _json(path: Path, url: str, request: bytes) -> Any:
    async with _connect(path, request) as reader:
        return json.loads(b"".join([part async for part in _body(reader, url)]))


async def complete(path: Path, body: Mapping[str, Any], leave_after: int | None = None) -> AsyncIterator[Answer]:
    """Send a completion of one choice; yield the answer so far at each event, and disconnect after `leave_after`.

    Raises CheckError.
    """
    answer = Answer()
    if leave_after == 0:
        async with _connect(path, _post("/v1/completions", _streamed(body))):
            return
    pieces = 0
    async with contextlib.aclosing(_events(path, "/v1/completions", body)) as events:
        async for event in events:
            (choice,) = event["choices"]
            _add(answer, choice)
            pieces += 1
            yield answer
            if pieces == leave_after:
                return


async def answers(path: Path, url: str, body: Mapping[str, Any], stream: bool) -> tuple[list[Answer], Any]:
    """Send a completion or a chat; return the answer of each choice, and the usage. Raises CheckError."""
    if not stream:
        answer = await post(path, url, {**body, "return_token_ids": True}, "answers")
        choices = answer["choices"]
        usage = answer["usage"]
    else:
        choices = []
        usage = None
        async for event in _events(path, url, body):
            choices += event["choices"]
            usage = usage or event.get("usage")
    by_index: dict[int, Answer] = {}
    for choice in choices:
        _add(by_index.setdefault(choice["index"], Answer()), choice)
    return [by_index[index] for index in sorted(by_index)], usage


async def gather(tasks: Sequence[Awaitable[None]], failures: list[str]) -> None:
    """Run all tasks; add the messages of CheckErrors to `failures`. Raises any other error."""
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, CheckError):
            failures.append(str(error))
        elif error is not None:
            raise error


def _streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "return_token_ids": True}


def _post(url: str, body: Mapping[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {url} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(data)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


async def _events(path: Path, url: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
    """Yield the events of a stream. Raises CheckError for an error, and for a stream without its end."""
    buffer = b""
    async with _connect(path, _post(url, _streamed(body))) as reader:
        async for part in _body(reader, url):
            *events, buffer = (buffer + part).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    return
                value = json.loads(event.removeprefix(b"data: "))
                if "error" in value:
                    raise CheckError(f"{url}: {value['error']['message']}")
                yield value
    raise CheckError(f"{url}: expected the end of the answer, found that the stream breaks off")


def _add(answer: Answer, choice: Mapping[str, Any]) -> None:
    message = choice.get("message") or choice.get("delta") or {}
    answer.token_ids += choice.get("token_ids") or ()
    answer.text += choice.get("text") or message.get("content") or ""
    answer.finish = choice["finish_reason"] or answer.finish
    logprobs = choice["logprobs"] or {}
    answer.logprobs += logprobs.get("token_logprobs", ())
    answer.tokens += logprobs.get("tokens", ())
    answer.offsets += logprobs.get("text_offset", ())
    answer.top += logprobs.get("top_logprobs", ())
    for entry in logprobs.get("content") or ():
        answer.logprobs.append(entry["logprob"])
        answer.tokens.append(entry["token"])
        answer.top.append({str(place): top["logprob"] for place, top in enumerate(entry["top_logprobs"])})


@contextlib.asynccontextmanager
async def _connect(path: Path, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
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
