"""What is known of a request for tokens when it has ended, for the request log and for traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.stream import FINISH_REASONS, Stream, StreamError

CLIENT_GONE = 499  # status of a request whose client left before there was one, as proxies log it
_NOTES = "lockstep.request"  # in the scope of a request: what its handler knows of it


def note(scope: Scope, **known: Any) -> None:
    """Note what is known of an HTTP request: `id`, `stream`, `in_chunks`, or its `error`."""
    scope.setdefault(_NOTES, {}).update(known)


@dataclass(frozen=True)
class EndedRequest:
    """A request that has ended, or was refused.

    began: by `time.monotonic`. endpoint: method and path, of gRPC the method. headers: those of HTTP, or gRPC's
    metadata. stream: of what made tokens for it. in_chunks: whether its answer came in chunks.
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
        error = self.error or (self.stream.error if self.stream else None)
        return error.code if error else None

    def figures(self) -> dict[str, Any]:
        """Return tokens, reasons and times of its answers; times are from when it was queued, as in /metrics."""
        stream = self.stream
        if stream is None:
            nothing = dict.fromkeys(("prompt_tokens", "completion_tokens", "n"))
            return {**nothing, "finish_reasons": [], "queue_seconds": None, "ttft_seconds": None}
        unfinished = "error" if stream.error else "abort"
        admitted = min((prompt.admitted for prompt in stream.prompts if prompt.admitted is not None), default=None)
        reasons = [choice.finish and FINISH_REASONS.get(choice.finish, choice.finish) for choice in stream.choices]
        return {
            "prompt_tokens": stream.num_prompt_tokens,
            "completion_tokens": stream.num_answer_tokens,
            "n": stream.prompts[0].request.n,
            "finish_reasons": [reason or unfinished for reason in reasons],
            "queue_seconds": None if admitted is None else round(admitted - stream.began, 6),
            "ttft_seconds": None if stream.first_token is None else round(stream.first_token - stream.began, 6),
        }


Observer = Callable[[EndedRequest], None]


def observed(app: ASGIApp, observers: Sequence[Observer]) -> ASGIApp:
    """Return the application that tells observers of each request with a `note`, when it has ended."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status = CLIENT_GONE

        async def sent(message: Message) -> None:
            nonlocal status
            await send(message)
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

    return call if observers else app
