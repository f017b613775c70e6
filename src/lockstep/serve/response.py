"""The common part of all answers to requests for tokens.

A client that may go away, and server-sent events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.types import Receive, Send

from lockstep.serve.stream import Stream

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def while_connected(answer: Coroutine[Any, Any, None], receive: Receive, close: Callable[[], None]) -> None:
    """Run `answer` until it is through or the client is gone.

    `close` what it waits for in any case.
    """
    gone, work = asyncio.create_task(_until_gone(receive)), asyncio.create_task(answer)
    try:
        await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
    except asyncio.CancelledError:  # the server ends, and the client does not read: it gets no more
        pass
    finally:
        for task in (gone, work):
            task.cancel()
        close()


async def send_events(events: AsyncIterator[bytes], stream: Stream | None, send: Send) -> None:
    """Send server-sent events; `stream` is told while one waits for its reader."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    async for event in events:
        if stream is not None:
            stream.sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        if stream is not None:
            stream.sending_since = None
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
