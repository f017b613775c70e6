"""A client of HTTP/1.1 that says when each piece of an answer came in.

Times are taken where the event loop hands over what was read from the socket, before anything is parsed. A connection
serves one request at a time and is used again for the next (keep-alive). No proxy, no redirect, no retry: each of them
would hide time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import InputError, pip_install

clock = time.perf_counter
# Seconds for which an idle connection is kept. Servers close theirs after 2 (gunicorn) or 5 (uvicorn): a request that
# meets the closing would fail, and to send it again would hide time.
_KEPT = 1.0
_LARGEST = 64 << 20  # bytes of an answer that is no stream


class NoAnswer(Exception):
    """The error of a connection that was not made, broke, or brought no HTTP: a line."""


@dataclass
class Answer:
    """The answer to a request. body: unless a callback took the pieces."""

    status: int
    headers: dict[str, str]
    body: bytearray = field(default_factory=bytearray)


OnPiece = Callable[[Answer, bytes, float], None]


class _Connection(asyncio.Protocol):
    """One connection: requests one after another."""

    def __init__(self, lost: Callable[[_Connection], None]) -> None:
        self._lost = lost
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._headers: dict[str, str] = {}
        self.transport: Any = None
        self.reusable = True
        self.since = 0.0  # the clock when it became idle

    def ask(self, request: bytes, on_piece: OnPiece | None) -> asyncio.Future[Answer]:
        """Send a request; return its answer's future. on_piece: gets each piece of the body and when it came."""
        import httptools

        self._parser = httptools.HttpResponseParser(self)
        self._on_piece = on_piece
        self._now = 0.0
        self._answer = None
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = clock()
        if self._done is None or self._done.done():  # nothing was asked
            return self.close()
        import httptools

        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of this program: asyncio shows it and closes the connection
        except httptools.HttpParserError as error:
            self._fail(f"expected an answer in HTTP, found {' '.join(str(error).split())}")

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        answer = self._answer
        if (
            answer is not None
            and "content-length" not in answer.headers
            and "chunked" not in answer.headers.get("transfer-encoding", "")
        ):
            self.on_message_complete()  # such a body ends with the connection
        self._fail(f"the connection was closed before the answer was whole{f' ({error})' if error else ''}")
        self._lost(self)

    # what the parser calls

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer = Answer(self._parser.get_status_code(), self._headers)

    def on_body(self, piece: bytes) -> None:
        assert self._answer is not None
        if self._on_piece is not None:
            self._on_piece(self._answer, piece, self._now)
        elif len(self._answer.body) + len(piece) > _LARGEST:
            self._fail(f"expected an answer of at most {_LARGEST >> 20} MiB, found a longer one")
        else:
            self._answer.body += piece

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status == 100:
            return
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            assert self._answer is not None
            self._done.set_result(self._answer)

    def _fail(self, line: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(NoAnswer(line))
        self.close()

    def close(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Connections to one server, for requests side by side, as an async context."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Take a server's URL, with or without a path or `/v1`; nothing is connected yet. Raises InputError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise InputError(f"{url}: expected a URL such as http://127.0.0.1:8000, found {error}") from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username
        ):
            raise InputError(f"{url}: expected a URL such as http://127.0.0.1:8000, found another kind of address")
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or not api_key):
            raise InputError("API key: expected printable ASCII characters on one line, found others")
        self.api_key = api_key
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{parts.scheme}://{host}:{self.port}{self._base}"
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {host}:{self.port}\r\nUser-Agent: lockstep-load\r\nAccept: */*\r\n{key}"
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def __aenter__(self) -> Client:
        try:
            import httptools  # noqa: F401
        except ModuleNotFoundError:
            raise InputError(
                f"load: needs the Python package 'httptools', which is not installed here; {pip_install('load')}"
            ) from None
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[_Connection]:
        """Give a connection of its own, kept if the answer is read to its end. Raises NoAnswer if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and not connection.transport.is_closing() and clock() - connection.since < _KEPT:
                break
            connection.close()
        else:
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._all.discard), self.host, self.port, ssl=self._ssl
                )
            except OSError as error:
                said = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
                raise NoAnswer(f"no connection: {said}") from None
            self._all.add(connection)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            connection.since = clock()
            self._idle.append(connection)
        else:
            connection.close()

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request. body: JSON, or nothing."""
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self._base}{path} HTTP/1.1\r\n{self._head}{about}\r\n".encode("latin-1") + body

    async def get(self, path: str, timeout: float = 10) -> Answer:
        """Return the answer to a GET. Raises NoAnswer."""

        async def ask() -> Answer:
            async with self.connection() as connection:
                return await connection.ask(self.request("GET", path), None)

        try:
            return await asyncio.wait_for(ask(), timeout)
        except asyncio.TimeoutError:
            raise NoAnswer(f"no answer within {timeout:g} s") from None
