"""The response to a request for tokens, in one piece or as server-sent events, for all APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep_serve.bodies import error_response
from lockstep_serve.ended_requests import note
from lockstep_serve.stream import Stream, StreamError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events until its buffer is full
]


class TokenResponse:
    """A response whose client may disconnect at any time; each API overrides `full_response` and `events`."""

    error_response: Callable[[Any], Response] = staticmethod(error_response)

    def __init__(self, id: str, stream: Stream | None, in_chunks: bool):
        self.id = id
        self._stream = stream
        self._in_chunks = in_chunks

    async def full_response(self) -> Response:
        """Return the complete answer. Raises StreamError."""
        raise NotImplementedError

    def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error after the first one is an event too."""
        raise NotImplementedError

    def close(self) -> None:
        """Abort the unfinished answers."""
        if self._stream is not None:
            self._stream.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note(scope, id=self.id, stream=self._stream, in_chunks=self._in_chunks)
        work = asyncio.create_task(self._run(scope, receive, send))
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((disconnect, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        except asyncio.CancelledError:  # the server ends while the client does not read
            pass
        finally:
            for task in (disconnect, work):
                task.cancel()
            self.close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._stream
        try:
            # Wait before the status is sent, because the engine may still refuse the request.
            if stream is not None:
                await stream.admission()
            if not self._in_chunks:
                return await (await self.full_response())(scope, receive, send)
        except StreamError as error:
            return await self.error_response(error)(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for event in self.events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    # If the body was not read to its end, more of it may come first.
    while (await receive())["type"] != "http.disconnect":
        pass
