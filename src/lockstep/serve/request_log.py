"""The log of requests: a JSON line, without texts and keys, for each that has ended, written by a thread."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.errors import InputError
from lockstep.serve.say import say
from lockstep.serve.stream import FINISH_REASONS, Stream, StreamError

CLIENT_GONE = 499  # status of a request whose client left before there was one, as proxies log it
_NOTES = "lockstep.request"  # in the scope of a request: what its handler knows of it
_MOST = 1 << 14  # lines that may wait for the disk
_SECONDS = 2.0  # that the last lines may take when the server ends


def note(scope: Scope, **known: Any) -> None:
    """Note what is known of an HTTP request for the log: `id`, `stream`, `in_chunks`, or its `error`."""
    scope.setdefault(_NOTES, {}).update(known)


class RequestLog:
    """A log file; `-` is stderr. Close it at the end."""

    def __init__(self, path: Path, model: str):
        """Open the file, and start its thread; model: in the lines. Raises InputError where it cannot be written."""
        self._path, self._model = path, model
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._end = sys.stderr.fileno() if str(path) == "-" else os.open(path, flags, 0o640)
        except OSError as error:
            raise InputError(
                f"--request-log: expected a file that can be written, found {path}: {error.strerror}"
            ) from None
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST)
        self._is_said = False  # that lines are lost
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._thread.start()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a line for each request with a `note`."""

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            began, status = time.monotonic(), CLIENT_GONE

            async def sent(message: Message) -> None:
                nonlocal status
                await send(message)
                if message["type"] == "http.response.start":
                    status = message["status"]

            try:
                await app(scope, receive, sent)
            finally:
                if scope["type"] == "http" and (notes := scope.get(_NOTES)) is not None:
                    self.add(began, f"{scope['method']} {scope['path'][:80]}", status, **notes)

        return logged

    def add(
        self,
        began: float,
        endpoint: str,
        status: int,
        id: str | None = None,
        stream: Stream | None = None,
        in_chunks: bool = False,
        error: StreamError | None = None,
    ) -> None:
        """Add the line of an ended request; began: by `time.monotonic`. stream: of what made tokens for it."""
        error = error or (stream.error if stream else None)
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "id": id[:80] if id else None,
            "endpoint": endpoint,
            "status": status,
            "model": self._model,
            "prompt_tokens": None,
            "completion_tokens": None,
            "n": None,
            "stream": in_chunks,
            "finish_reasons": [],
            "queue_seconds": None,
            "ttft_seconds": None,
            "seconds": round(time.monotonic() - began, 6),
            "error": error.code if error else None,
            **(_of_stream(stream) if stream else {}),
        }
        try:
            self._lines.put_nowait(json.dumps(line).encode() + b"\n")
        except queue.Full:
            self._lost("the disk is too slow")

    def close(self) -> None:
        """Write what is left, if that takes no longer than a moment."""
        try:
            self._lines.put(None, timeout=_SECONDS)
        except queue.Full:
            return
        self._thread.join(_SECONDS)

    def _write_all(self) -> None:
        begun = b""  # ends a line of which a part was written
        while (line := self._lines.get()) is not None:
            try:
                written = os.write(self._end, begun + line)
                begun = b"" if written == len(begun) + len(line) else b"\n"
                if begun:
                    self._lost("the disk took a part of a line")
            except OSError as error:
                self._lost(error.strerror or str(error))

    def _lost(self, why: str) -> None:
        if not self._is_said:
            self._is_said = True
            say(f"{self._path}: request log: lines are lost: {why}")


def _of_stream(stream: Stream) -> Mapping[str, Any]:
    """Return the fields that an ended stream tells; times are from when it was queued, as in /metrics."""
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
