"""A proxy that plants a fault into a server's requests or answers, for `certify`. A URL in, another URL out."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
import urllib.parse
from collections.abc import Sequence
from typing import Any

from lockstep.artifacts.certificate import COMPLETION, Question

DRAWN = "drawn at temperature 1"
PENALTY = "a repetition penalty of 1.2"
TEMPLATE = "another chat template"
KEPT = 96  # tokens of a truncated context
TRUNCATED = f"the last {KEPT} tokens alone"
CROSSED = "another request's answer, 1 in 4, at once"
MANY = "another request's answer, 1 in 10"
SOMETIMES = {MANY: 10, "another request's answer, 1 in 50": 50}
UNKNOWN_TEXT = "a text that no candidate has, 1 in 10"
FAULTS = (DRAWN, PENALTY, TEMPLATE, TRUNCATED, *SOMETIMES, CROSSED, UNKNOWN_TEXT)


class Proxy(http.server.ThreadingHTTPServer):
    """A server before the one at `backend`, a URL up to `/v1`, with one of `FAULTS`. Use as a context.

    questions: that it is asked.
    """

    request_queue_size = 128  # a burst of requests

    def __init__(self, backend: str, fault: str, questions: Sequence[Question]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        parts = urllib.parse.urlsplit(backend)
        self.url = f"http://127.0.0.1:{self.server_port}{parts.path}"
        self._address = parts.netloc
        self._fault = fault
        self._ids = {question.text: question.prompt_ids for question in questions if question.kind == COMPLETION}
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_running = 0
        self._last: dict[str, tuple[int, bytes]] = {}  # the last answer of each path

    def __enter__(self) -> Proxy:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return the status and the data of an answer."""
        with self._lock:
            self._num_requests += 1
            number = self._num_requests
            self._num_running += 1
        self._plant(body, number)
        connection = http.client.HTTPConnection(self._address, timeout=300)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.status, response.read()
        finally:
            connection.close()
        with self._lock:
            previous = self._last.get(path, answer)
            self._last[path] = answer
            is_crowded = self._num_running > 1
            self._num_running -= 1
        if self._fault == UNKNOWN_TEXT and number % 10 == 0:
            return 200, json.dumps({"choices": [{"text": " 0x", "message": {"content": " 0x"}}]}).encode()
        every = SOMETIMES.get(self._fault, 4 if self._fault == CROSSED and is_crowded else 0)
        return previous if every and number % every == 0 else answer

    def _plant(self, body: dict[str, Any], number: int) -> None:
        if self._fault == DRAWN:
            body.update(temperature=1, seed=number)
        if self._fault == PENALTY:
            body["repetition_penalty"] = 1.2
        if self._fault == TEMPLATE and "messages" in body:
            body["messages"].insert(0, {"role": "system", "content": "You are a helpful assistant."})
        if self._fault == TRUNCATED and "prompt" in body:
            body["prompt"] = self._ids[body["prompt"]][-KEPT:]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, data = self.server.answer(self.path, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
