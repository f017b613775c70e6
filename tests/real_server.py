"""`lockstep serve` in its own process, and requests as any client makes them."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from demo_model import CONFIG

from lockstep.artifacts.files import write_json
from lockstep.targets import Results

STARTS = 60  # seconds that a start may take on a busy machine
ENDS = 60  # as generous: a test waits for an event, and how long that takes is the machine's
_MAX_STDERR = 1 << 24  # bytes


def make_tree(folder: Path, demo: Results, **limits: int) -> Path:
    """Results of the demo that a server can be started on, with its own limits."""
    shutil.copytree(demo.root, folder, dirs_exist_ok=True, copy_function=os.link)
    config = CONFIG.model_copy(update={"limits": CONFIG.limits.model_copy(update=limits)})
    write_json(Results(folder).config(), config.dump())
    return folder


class RealServer:
    """A server that is ready.

    `url`, and `line`: its first line of output. Use as a context: it gets SIGTERM, and must then end by itself.
    """

    def __init__(
        self,
        tree: Path,
        *options: object,
        target: str | None = "demo-llama/fp32/all",
        python: str = sys.executable,
        **environment: str,
    ):
        # No file of the tree: another test's server may run on the same one.
        self._stderr = tempfile.TemporaryFile()
        arguments = ["serve", *([target] if target else []), "--results", tree, "--port", 0, *options]
        self.process = subprocess.Popen(
            [python, "-m", "lockstep", *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._stderr, text=True, env={**os.environ, "LOCKSTEP_THREADS": "1", **environment},
        )  # fmt: skip
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], STARTS)
        self.line = self.process.stdout.readline() if readable else ""
        match = re.match(r"ready: (http://\S+:(\d+)) ", self.line)
        if match is None:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not start: {self.line!r} {self.stderr}")
        self.headers: dict[str, str] = {}  # of requests that have none of their own
        self.url = match[1]
        self.port = int(match[2])

    def __enter__(self) -> RealServer:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(ENDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    @property
    def stderr(self) -> str:
        return os.pread(self._stderr.fileno(), _MAX_STDERR, 0).decode()

    @property
    def engine_pid(self) -> int:
        """Return the process that steps: the server's only child that does."""
        for path in Path("/proc", str(self.process.pid), "task").glob("*/children"):
            for child in path.read_text().split():
                if b"lockstep_serve.engine_process" in Path("/proc", child, "cmdline").read_bytes():
                    return int(child)
        raise AssertionError("there is no engine process")

    def num_sockets(self) -> int:
        """Return how many sockets the process has open."""
        links = []
        for path in Path("/proc", str(self.process.pid), "fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                links.append(os.readlink(path))
        return sum(link.startswith("socket:") for link in links)

    @contextmanager
    def stopped_engine(self) -> Iterator[None]:
        """While the engine does not run."""
        pid = self.engine_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, seconds: float = 60
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return status, headers (names in small letters) and body.

        body: bytes, or a value to send as JSON.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or self.headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """Return the JSON at `path`, whatever its status."""
        return json.loads(self.request("GET", path)[2])

    def post(self, path: str, **body: Any) -> Any:
        """Return the JSON that a request is answered with; it must succeed."""
        status, _, data = self.request("POST", path, body)
        assert status == 200, (status, data)
        return json.loads(data)

    def complete(self, prompt: Any, max_tokens: int = 16, **body: Any) -> Any:
        """Return a completion of the demo model, greedy unless told otherwise."""
        options = {"model": "demo-llama", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.post("/v1/completions", **{**options, **body})

    @contextmanager
    def opened(self, prompt: Any, max_tokens: int = 16, path: str = "/v1/completions", **body: Any) -> Iterator[Events]:
        """Open a stream that may be left before its end."""
        options = {"model": "demo-llama", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        events = Events(self.port, path, {**options, **body})
        try:
            yield events
        finally:
            events.close()

    def wait_until(self, holds: Any) -> Any:
        """Ask for /status until `holds` of it; gives it."""
        end = time.monotonic() + ENDS
        while True:
            status = self.get("/status")
            if holds(status):
                return status
            assert time.monotonic() < end, status
            time.sleep(0.01)

    def wait_idle(self) -> None:
        """Wait until nothing runs or waits. Then all pages that hold no reusable prefix must be free."""
        self.wait_until(lambda status: not status["running"] and not status["waiting"])
        pages = self.get("/status")["pages"]
        assert pages["used"] == 0, pages


class Events:
    """Server-sent events of one request: iterate to get their JSON. `status`, and `error`: the body of a refusal."""

    def __init__(self, port: int, path: str, body: dict[str, Any]):
        self.socket = socket.create_connection(("127.0.0.1", port), 60)
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.sock = self.socket
        self._connection.request("POST", path, json.dumps(body))
        self._answer: http.client.HTTPResponse | None = None
        self.done = False  # the stream said that it is through

    @property
    def answer(self) -> http.client.HTTPResponse:
        if self._answer is None:
            self._answer = self._connection.getresponse()
        return self._answer

    @property
    def status(self) -> int:
        return self.answer.status

    def __iter__(self) -> Iterator[Any]:
        for line in self.answer:
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])

    def text(self) -> str:
        """Return the rest of the text of a completion."""
        text = ""
        for event in self:
            text += "".join(choice.get("text", "") for choice in event["choices"])
        return text

    def close(self) -> None:
        """Break the connection off."""
        if self._answer is not None:
            self._answer.close()
        self._connection.close()
        self.socket.close()
