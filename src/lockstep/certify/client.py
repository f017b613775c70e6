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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.artifacts.certificate import CHAT, Question
from lockstep.errors import InputError, LockstepError

_TRIES = 5  # of a request that the endpoint is too busy for
_WAIT = 1.0  # seconds before the second try, twice as many before each further one
_LONGEST_WAIT = 30.0
_BUSY = (429, 502, 503, 504)
_REFUSED = (400, 422, 500, 501)
_LARGEST = 1 << 24  # bytes of an answer
_LISTED_COUNTS = (20, 5, 1, 0)
_TOKEN_ID = "token_id:"


class TooLong(LockstepError):
    """The endpoint refuses a prompt, and says that it is too long."""


class NotServed(InputError):
    """The endpoint has no such path."""


class Spent(LockstepError):
    """All requests are sent."""


@dataclass(frozen=True)
class Form:
    """What a request asks for: how many log-probabilities, whether those of the prompt too, and ids for texts."""

    listed: int = _LISTED_COUNTS[0]
    echoes: bool = True
    names_ids: bool = True

    def weaker(self, words: str) -> Form | None:
        """Return a form without what a refusal speaks of; None where it speaks of nothing of this form."""
        if self.names_ids and "token_id" in words:
            return replace(self, names_ids=False)
        if self.echoes and "echo" in words:
            return replace(self, echoes=False)
        if self.listed and "logprob" in words:
            return replace(self, listed=_LISTED_COUNTS[_LISTED_COUNTS.index(self.listed) + 1])
        return None

    def fields(self, is_chat: bool) -> dict[str, Any]:
        """Return its fields of a request's body."""
        fields: dict[str, Any] = {}
        if self.listed and is_chat:
            fields = {"logprobs": True, "top_logprobs": self.listed}
        elif self.listed:
            fields = {"logprobs": self.listed, "echo": self.echoes}
        if self.listed and self.names_ids:
            fields["return_tokens_as_token_ids"] = True
        return {name: value for name, value in fields.items() if value}


class FormRefused(LockstepError):
    """The endpoint refuses what a request asks for besides a token. weaker: what to ask for."""

    def __init__(self, weaker: Form) -> None:
        super().__init__(f"{weaker} is left to ask for")
        self.weaker = weaker


@dataclass(frozen=True)
class Token:
    """A token of an answer: its text, or `token_id:` and its id; {text or id: log-probability} of the likeliest."""

    text: str
    logprobs: Mapping[str, float]


@dataclass(frozen=True)
class Reply:
    """An answer: the token that was chosen, and those of the prompt where the endpoint repeats it."""

    token: Token
    prompt: Sequence[Token] = ()


class Endpoint:
    """An endpoint.

    url: up to `/v1`. key: None for none. timeout: seconds. rate: requests a second at most, 0 for any. requests: that
    are sent at most, those that the endpoint is too busy for among them.
    """

    def __init__(self, url: str, model: str, key: str | None, timeout: float, rate: float, requests: int) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise InputError(f"expected a URL as http://localhost:8000/v1, found {url[:120]!r}; correct it")
        self.url = url.rstrip("/")
        self.model = model
        self.remaining = requests
        self._host = parts.hostname
        self._port = parts.port
        self._path = parts.path.rstrip("/")
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = timeout
        self._interval = 1 / rate if rate else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def ask(self, question: Question, form: Form) -> Reply:
        """Return the answer to a question.

        Raises FormRefused, TooLong, NotServed, Spent, and InputError for whatever else is no answer.
        """
        is_chat = question.kind == CHAT
        path = "/completions"
        body: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0, "seed": 0}
        if is_chat:
            path = "/chat/completions"
            body["messages"] = [{"role": "user", "content": question.text}]
        else:
            body["prompt"] = question.text
        answer = self._post(path, body | form.fields(is_chat), form)
        try:
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if is_chat else choice["text"]
            tokens = _tokens(choice.get("logprobs") or {})
            if not tokens:
                tokens = [Token((text or "").removeprefix(question.text), {})]  # echoed, though logprobs was ignored
        except (LookupError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{self.url}: expected a completion of one choice, found {json.dumps(answer)[:160]}; is this an "
                "endpoint of OpenAI's API?"
            ) from None
        if len(tokens) > 1 and len(tokens) != len(question.prompt_ids) + 1:  # such as llama-cpp-python's, off by one
            raise FormRefused(replace(form, echoes=False))
        return Reply(tokens[-1], tokens[:-1])

    def _post(self, path: str, body: Mapping[str, Any], form: Form) -> Any:
        wait = _WAIT
        for number in range(_TRIES):
            status, kind, after, data = self._send(path, body)
            if status not in _BUSY or number + 1 == _TRIES:
                break
            time.sleep(min(_LONGEST_WAIT, float(after) if after.isdecimal() else wait))
            wait *= 2
        words = " ".join(data.decode(errors="replace").split())[:400]
        where = f"{self.url}{path}"
        if status == 404 and self.model not in words:
            raise NotServed(f"{where}: expected an answer, found no such path (404): {words}; correct the URL")
        if status in (401, 403):
            raise InputError(f"{where}: expected the key to be accepted, found {status}; set the variable of --key-env")
        if status == 429:
            raise InputError(
                f"{where}: expected an answer in {_TRIES} tries, found too many requests (429); set --rate"
            )
        if status in _REFUSED and (weaker := form.weaker(words.lower())):
            raise FormRefused(weaker)
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

    def _turn(self) -> float:
        """Count a request; return the seconds until it may be sent."""
        with self._lock:
            if self.remaining <= 0:
                raise Spent(f"{self.url}: all requests are sent")
            self.remaining -= 1
            now = time.monotonic()
            begins = max(now, self._next)
            self._next = begins + self._interval
        return begins - now

    def _send(self, path: str, body: Mapping[str, Any]) -> tuple[int, str, str, bytes]:
        time.sleep(self._turn())
        connection: http.client.HTTPConnection
        if self._context:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request("POST", f"{self._path}{path}", json.dumps(body).encode(), self._headers)
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


def _tokens(logprobs: Mapping[str, Any]) -> list[Token]:
    """Read log-probabilities in the form of OpenAI's completions, or of its chats, which llama.cpp has for both."""
    tokens = []
    for entry in logprobs.get("content") or ():
        listed = [entry, *(entry.get("top_logprobs") or ())]
        tokens.append(Token(_name(entry), {_name(other): float(other["logprob"]) for other in listed}))
    if tokens:
        return tokens
    names = logprobs.get("tokens") or ()
    nothing = [None] * len(names)
    values = logprobs.get("token_logprobs") or nothing
    tops = logprobs.get("top_logprobs") or nothing
    for name, value, top in zip(names, values, tops, strict=True):
        by_name = {str(name): value, **(top or {})}
        logprob_of = {str(other): float(number) for other, number in by_name.items() if number is not None}
        tokens.append(Token(str(name), logprob_of))
    return tokens


def _name(entry: Mapping[str, Any]) -> str:
    if isinstance(entry.get("id"), int):
        return f"{_TOKEN_ID}{entry['id']}"
    return str(entry["token"])


def token_id(name: str) -> int | None:
    """Return the id of a token that is named by it; None for a text."""
    digits = name.removeprefix(_TOKEN_ID)
    if digits != name and digits.isdecimal():
        return int(digits)
    return None
