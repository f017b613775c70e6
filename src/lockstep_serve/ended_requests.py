"""Requests for tokens that have ended, for the request log and for traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep_serve.stream import Stream, StreamError, finish_reason

CLIENT_GONE = 499  # as proxies log a request whose client disconnected before it had a status
_NOTES = "lockstep.request"  # key in a request's ASGI scope: what `note` wrote


def note(scope: Scope, **fields: Any) -> None:
    """Note fields of an HTTP request for its `EndedRequest`: `id`, `stream`, `in_chunks`, `error`."""
    scope.setdefault(_NOTES, {}).update(fields)


@dataclass(frozen=True)
class EndedRequest:
    """A request that has ended, or was refused.

    began: by `time.monotonic`. endpoint: method and path, of gRPC the method. headers: those of HTTP, or gRPC's
    metadata. stream: None if no tokens were generated. in_chunks: whether the answer was streamed.
    """

    began: float
    endpoint: str
    status: int
    headers: Mapping[str, Any]
    id: str | None = None
    stream: Stream | None = None
    in_chunks: bool = False
    error: StreamError | None = None

    @property
    def error_code(self) -> str | None:
        error = self.error
        if error is None and self.stream is not None:
            error = self.stream.error
        return None if error is None else error.code

    def model(self, default: str) -> str:
        """Return the name of the model that ran it; the default for a request that none ran."""
        return default if self.stream is None else self.stream.metrics.model

    def figures(self) -> dict[str, Any]:
        """Return tokens, reasons and times of its answers; times are from when it was queued, as in /metrics."""
        stream = self.stream
        if stream is None:
            counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "n"))
            return {**counts, "finish_reasons": [], "queue_seconds": None, "ttft_seconds": None}
        unfinished = "error" if stream.error else "abort"
        admitted = min((prompt.admitted for prompt in stream.prompts if prompt.admitted is not None), default=None)
        reasons = [finish_reason(choice.finish) for choice in stream.choices]

        def seconds_until(event: float | None) -> float | None:
            return event and round(event - stream.began, 6)

        return {
            "prompt_tokens": stream.num_prompt_tokens,
            "completion_tokens": stream.num_answer_tokens,
            "n": stream.prompts[0].request.n,
            "finish_reasons": [reason or unfinished for reason in reasons],
            "queue_seconds": seconds_until(admitted),
            "ttft_seconds": seconds_until(stream.first_token),
        }


Observer = Callable[[EndedRequest], None]


def observed(app: ASGIApp, observers: Sequence[Observer]) -> ASGIApp:
    """Return the application wrapped so that it calls observers with each ended request that has a `note`."""
    if not observers:
        return app

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status = CLIENT_GONE

        async def sent(message: Message) -> None:
            nonlocal status
            await send(message)
            # Only after it was sent: a client that disconnects before that counts as gone.
            if message["type"] == "http.response.start":
                status = message["status"]

        try:
            await app(scope, receive, sent)
        finally:
            if scope["type"] == "http" and (notes := scope.get(_NOTES)) is not None:
                endpoint = f"{scope['method']} {scope['path'][:80]}"
                ended = EndedRequest(began, endpoint, status, Headers(scope=scope), **notes)
                for observe in observers:
                    observe(ended)

    return call
