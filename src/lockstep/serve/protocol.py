"""uvicorn's HTTP/1.1, with limits on the head of a request."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 1 << 16
_HEAD_SECONDS = 60.0


class LimitedProtocol(HttpToolsProtocol):
    """A protocol that limits a head's bytes, and the seconds that one may take."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head, self._in_head = 0, True
        self._deadline = self.loop.call_later(_HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head += len(data)
            if self._head > _HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"head: expected at most {_HEAD_BYTES} bytes, found more")

    def on_message_begin(self) -> None:
        self._head, self._in_head = 0, True
        self._deadline.cancel()
        self._deadline = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > _HEAD_BYTES:
            raise ValueError(f"head: expected at most {_HEAD_BYTES} bytes, found more")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._deadline.cancel()  # a body has its own, and uvicorn has one for a connection that is kept
        super().on_headers_complete()
