"""A server of OpenAI's wire format that does what a test says.

Wait, stall, refuse, break off. For what a client has to stand, which the real server cannot be made to do. Runs in a
thread, on its own port.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Step = float | str | bytes | dict[str, Any]
# A request's body and its number to the steps of its answer: seconds to wait, text to send, an event, raw bytes. The
# number counts from 0 and counts prompts only.
Script = Callable[[dict[str, Any], int], Iterator[Step]]
END = b"0\r\n\r\n"  # the last chunk of an answer
PIECE = 0.002  # seconds between two pieces of the usual answer


def words(body: dict[str, Any], number: int) -> Iterator[Step]:
    """Return as many words as tokens are requested, each a piece."""
    for at in range(body["max_tokens"]):
        yield PIECE
        yield f"w{at} "


class ScriptedServer:
    """The server, and what became of its requests.

    `bodies`: of requests; `gone`: numbers of the requests whose client left before the end.
    """

    def __init__(self, script: Script = words) -> None:
        # type: ignore[var-annotated]
        self.script = script
        self.bodies = []
        self.gone = []
        self.usage: Callable[[dict[str, Any]], dict[str, int]] = usage
        self.refusal: Callable[[int], tuple[int, str] | None] = lambda number: None
        self.pages: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.status: dict[str, Any] = {}
        self.status_code = 200
        self.connections = 0
        self._stalls: list[tuple[float, float]] = []
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(120)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Close all connections and the port. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def stall(self, after: float, seconds: float) -> None:
        """Do nothing at all for some time, as a process that was stopped.

        after: seconds from the next request on, for a client on a busy machine starts late.
        """
        self._stalls.append((after, seconds))

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                method, path, _ = head.split(" ", 2)
                length = next(
                    (int(item[15:]) for item in head.lower().split("\r\n") if item.startswith("content-length:")), 0
                )
                body = await reader.readexactly(length)
                if method == "POST":
                    await self._answer(path, json.loads(body), reader, writer)
                else:
                    self._get(path, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client, or the test, has gone
        finally:
            writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path in self.pages:
            content, headers = self.pages[path]
            return _whole(writer, 200, content, headers)
        if path == "/status" and self.status_code != 200:
            return _whole(writer, self.status_code, b"{}")
        value = {"/v1/models": {"data": [{"id": "scripted"}]}, "/status": self.status}.get(path)
        _whole(
            writer, 404 if value is None else 200, json.dumps(value or {"error": {"message": f"no {path}"}}).encode()
        )

    async def _answer(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        while self._stalls:
            after, seconds = self._stalls.pop()
            self._loop.call_later(after, time.sleep, seconds)
        if refusal := self.refusal(number):
            return _whole(
                writer, refusal[0], json.dumps({"error": {"message": refusal[1]}}).encode(), {"Retry-After": "7"}
            )
        is_chat = path.endswith("/chat/completions")
        if not body.get("stream"):
            text = "".join(step for step in self.script(body, number) if isinstance(step, str))
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            value = {"choices": [{**choice, "finish_reason": "length"}], "usage": self.usage(body)}
            return _whole(writer, 200, json.dumps(value).encode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if is_chat:
            _send(writer, {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]})
        for step in self.script(body, number):
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, str):
                _send(
                    writer,
                    {
                        "choices": [
                            {**({"delta": {"content": step}} if is_chat else {"text": step}), "finish_reason": None}
                        ]
                    },
                )
            elif isinstance(step, bytes):
                writer.write(step)
                # An answer that has its end leaves the connection open: a client may send the next request at once.
                return None if step == END else writer.close()
            else:
                _send(writer, step)
            if writer.transport.is_closing() or reader.at_eof():
                self.gone.append(number)
                raise ConnectionResetError
            await writer.drain()
        last = {"delta": {}} if is_chat else {"text": ""}
        _send(writer, {"choices": [{**last, "finish_reason": "length"}]})
        _send(writer, {"choices": [], "usage": self.usage(body)})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(END)


def usage(body: dict[str, Any]) -> dict[str, int]:
    """Return what the server says it counted: ids, else words."""
    prompt = body.get("prompt", "")
    return {
        "prompt_tokens": len(prompt if isinstance(prompt, list) else prompt.split()),
        "completion_tokens": body["max_tokens"],
    }


def _send(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _whole(writer: asyncio.StreamWriter, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
    lines = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(content))}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode() + content)
