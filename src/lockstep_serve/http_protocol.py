"""uvicorn's HTTP/1.1 with limits on the head of a request, and on how slowly a client may read its answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_HEAD_BYTES = 1 << 16
_HEAD_SECONDS = 60.0
_LINGER_SECONDS = 2.0  # in which a client may finish its body after an early answer
_POLLS = 8  # per `slow_reader` seconds


class _CountingTransport:
    """A transport that counts the bytes that its client has received."""

    def __init__(self, transport: Any):
        self._transport = transport
        self._num_written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._num_written += len(data)
        self._transport.write(data)

    def num_taken(self) -> int:
        """Return the number of bytes that have reached the client's kernel.

        Ours buffers megabytes, and accepts no more until a third has left: the write buffer alone says too little.
        """
        queued = b"\0" * 4
        with contextlib.suppress(OSError, ValueError):  # the latter of a socket that is closed
            queued = fcntl.ioctl(self.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._num_written - self.get_write_buffer_size() - int.from_bytes(queued, sys.byteorder)


class LimitedProtocol(HttpToolsProtocol):
    """A protocol with limits on heads (bytes, seconds, one host), and on bodies that are answered early.

    slow_reader: seconds after which a client that receives nothing of its answer is disconnected.
    """

    def __init__(self, *args: Any, slow_reader: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._slow_reader = slow_reader
        self._poll: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._counting_transport = _CountingTransport(transport)
        super().connection_made(cast(Any, self._counting_transport))
        self._head = 0
        self._in_head = True
        self._deadline = self.loop.call_later(_HEAD_SECONDS, transport.abort)
        self._refusal: str | None = None
        self._is_over = False  # the connection's last answer was sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        if self._poll is not None:
            self._poll.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head += len(data)
            if self._head > _HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"head: expected at most {_HEAD_BYTES} bytes, found more")

    def on_message_begin(self) -> None:
        self._head = 0
        self._in_head = True
        self._deadline.cancel()
        self._deadline = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > _HEAD_BYTES:
            self._refuse(f"head: expected at most {_HEAD_BYTES} bytes, found more")
        super().on_header(name, value)

    def _refuse(self, reason: str) -> NoReturn:
        """End a request by ValueError, which uvicorn answers with 400 and `reason`."""
        self._refusal = reason
        raise ValueError(reason)

    def _watch_reader(self) -> None:
        """Poll how much the client receives, until the write buffer is empty."""
        if self._poll is None:
            self._poll_later(self._counting_transport.num_taken(), self.loop.time())

    def _poll_later(self, num_taken: int, since: float) -> None:
        self._poll = self.loop.call_later(self._slow_reader / _POLLS, self._poll_reader, num_taken, since)

    def _poll_reader(self, num_taken_before: int, since: float) -> None:
        """Close the connection if its client has received nothing for `slow_reader` seconds."""
        self._poll = None
        if not self.transport.get_write_buffer_size():
            return
        now = self.loop.time()
        num_taken = self._counting_transport.num_taken()
        if num_taken > num_taken_before:
            since = now
        if now - since >= self._slow_reader:
            self.transport.abort()  # `close` would wait for the client
        else:
            self._poll_later(num_taken, since)

    def send_400_response(self, msg: str) -> None:
        self._watch_reader()
        super().send_400_response(self._refusal or msg)

    def on_headers_complete(self) -> None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        version = self.parser.get_http_version()
        if hosts > 1 or (not hosts and version not in ("0.9", "1.0")):
            self._refuse(f"host: expected one line of the head, found {hosts or 'none'}")
        self._in_head = False
        self._deadline.cancel()  # bodies have `Access.body_timeout`, idle connections uvicorn's timeout_keep_alive
        super().on_headers_complete()
        self.cycle.send = self._sender(self.cycle, self.cycle.send, version)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._is_over:
            self.transport.close()

    def _sender(self, cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], version: str) -> Any:
        """Return the answer's `send`, which lets a client finish its body: a reset could destroy the answer."""
        is_raw = False
        lingers = False

        async def sent(message: Any) -> None:
            nonlocal is_raw, lingers
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if version == "1.0" and not any(name.lower() == b"content-length" for name, _ in headers):
                    # The end of the connection ends the answer.
                    is_raw = True
                    cycle.chunked_encoding = False
                lingers = cycle.more_body
                if lingers and not any(name.lower() == b"connection" for name, _ in headers):
                    message = {**message, "headers": [*headers, (b"connection", b"close")]}
            elif is_raw:  # uvicorn refuses more bytes than were announced: here each part is announced as it comes
                cycle.expected_content_length = len(message.get("body", b""))
            self._watch_reader()
            await send(message)
            if lingers:
                cycle.keep_alive = True  # or uvicorn would close it
                if cycle.response_complete and not self.transport.is_closing():
                    self._is_over = True
                    self._deadline = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
                    self.transport.write_eof()

        return sent
