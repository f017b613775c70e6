"""Ask an endpoint of OpenAI's API for one token. A URL and questions in, log-probabilities and texts out.

Connects to the host of the URL and nothing else: no proxy, no redirection. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts.certificate import CHAT, Question
from lockstep.errors import InputError, LockstepError

_TRIES = 5  # of a request that the endpoint is too busy for
_WAIT = 1.0  # seconds before the second try, twice as many before each further one
_LONGEST_WAIT = 30.0
_BUSY = (429, 502, 503, 504)
_LARGEST = 1 << 22  # bytes of an answer
_PATHS = {CHAT: "/chat/completions"}


class NoLogprobs(LockstepError):
    """The endpoint refuses requests with this number of log-probabilities."""


class TooLong(LockstepError):
    """The endpoint refuses a prompt, and says that it is too long."""


class NotServed(InputError):
    """The endpoint has no such path."""


@dataclass(frozen=True)
class Reply:
    """An answer of one token: its text, and {text: log-probability} of the likeliest; empty where none are given."""

    text: str
    logprobs: Mapping[str, float]


class Endpoint:
    """An endpoint. url: up to `/v1`. key: None for none. rate: requests a second at most, 0 for any."""

    def __init__(self, url: str, model: str, key: str | None, timeout: float, rate: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise InputError(f"expected a URL as http://localhost:8000/v1, found {url[:120]!r}; correct it")
        self.url = url.rstrip("/")
        self._parts = parts
        self._path = parts.path.rstrip("/")
        self._model = model
        self._key = key
        self._timeout = timeout
        self._interval = 1 / rate if rate else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def ask(self, question: Question, logprobs: int) -> Reply:
        """Return the answer to a question, with `logprobs` of the likeliest tokens; 0 for none.

        Raises NoLogprobs, TooLong, NotServed, and InputError for whatever else is no answer.
        """
        body: dict[str, Any] = {"model": self._model, "max_tokens": 1, "temperature": 0, "seed": 0}
        if question.kind == CHAT:
            body["messages"] = [{"role": "user", "content": question.text}]
            if logprobs:
                body |= {"logprobs": True, "top_logprobs": logprobs}
        else:
            body["prompt"] = question.text
            if logprobs:
                body["logprobs"] = logprobs
        answer = self._post(_PATHS.get(question.kind, "/completions"), body, bool(logprobs))
        try:
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if question.kind == CHAT else choice["text"]
            return _reply(text or "", choice.get("logprobs") or {})
        except (LookupError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{self.url}: expected a completion of one choice, found {json.dumps(answer)[:160]}; is this an "
                "endpoint of OpenAI's API?"
            ) from None

    def _post(self, path: str, body: Mapping[str, Any], has_logprobs: bool) -> Any:
        wait = _WAIT
        for number in range(_TRIES):
            status, kind, after, data = self._send(path, body)
            if status not in _BUSY or number + 1 == _TRIES:
                break
            time.sleep(min(_LONGEST_WAIT, float(after) if after.isdecimal() else wait))
            wait *= 2
        words = " ".join(data.decode(errors="replace").split())[:200]
        where = f"{self.url}{path}"
        if status == 404 and self._model not in words:
            raise NotServed(f"{where}: expected an answer, found no such path (404): {words}; correct the URL")
        if status in (401, 403):
            raise InputError(f"{where}: expected the key to be accepted, found {status}; set the variable of --key-env")
        if status == 429:
            raise InputError(
                f"{where}: expected an answer in {_TRIES} tries, found too many requests (429); set --rate"
            )
        if status in (400, 422, 500) and has_logprobs and "logprob" in words.lower():
            raise NoLogprobs(f"{where}: expected log-probabilities, found {status}: {words}")
        if status in (400, 413, 422) and re.search("token|context|length|long", words):
            raise TooLong(f"{where}: a question was left out: {status}: {words}")
        if status != 200:
            raise InputError(f"{where}: expected status 200, found {status}: {words}; correct --model or the URL")
        if kind.startswith("text/event-stream"):
            raise InputError(f"{where}: expected one JSON answer, found a stream; the endpoint must answer whole")
        try:
            return json.loads(data)
        except ValueError:
            raise InputError(
                f"{where}: expected JSON, found {kind or 'no type'}: {words[:80]}; correct the URL"
            ) from None

    def _send(self, path: str, body: Mapping[str, Any]) -> tuple[int, str, str, bytes]:
        with self._lock:
            now = time.monotonic()
            begins = max(now, self._next)
            self._next = begins + self._interval
        time.sleep(begins - now)
        host = self._parts.hostname or ""
        connection: http.client.HTTPConnection
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, self._parts.port, timeout=self._timeout, context=context)
        else:
            connection = http.client.HTTPConnection(host, self._parts.port, timeout=self._timeout)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request("POST", f"{self._path}{path}", json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            kind = answer.getheader("Content-Type", "")
            data = b"" if kind.startswith("text/event-stream") else answer.read(_LARGEST)
            return answer.status, kind, answer.getheader("Retry-After", ""), data
        except TimeoutError:
            raise InputError(
                f"{self.url}: expected an answer within {self._timeout:g} s, found none; raise --timeout"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"{self.url}: expected an endpoint, found {error or type(error).__name__}") from None
        finally:
            connection.close()


def _reply(text: str, logprobs: Mapping[str, Any]) -> Reply:
    """Read log-probabilities in the form of OpenAI's completions, or of its chats, which llama.cpp has for both."""
    if entries := logprobs.get("content"):
        every = [entries[0], *(entries[0].get("top_logprobs") or ())]
        return Reply(str(entries[0]["token"]), {str(entry["token"]): float(entry["logprob"]) for entry in every})
    if not logprobs.get("tokens"):
        return Reply(text, {})
    token = str(logprobs["tokens"][0])
    top = (logprobs.get("top_logprobs") or [None])[0] or {}
    by_text = {str(name): float(value) for name, value in top.items() if value is not None}
    if (value := (logprobs.get("token_logprobs") or [None])[0]) is not None:
        by_text.setdefault(token, float(value))
    return Reply(token, by_text)
