"""Endpoints that do not answer as they should, each one line."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.artifacts.certificate import CHAT, COMPLETION, Question
from lockstep.certify import client
from lockstep.certify.client import Endpoint, Form, FormRefused, NotServed, Reply, Spent, Token, TooLong
from lockstep.errors import InputError

QUESTION = Question(COMPLETION, "San Francisco is a", (1, 2), (3,), (" city",))
Answer = tuple[int, str, bytes]
JSON = "application/json"


class Scripted:
    """A server of given answers, one after another, the last one again and again. bodies: that it was sent."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.wait = 0.0
        script = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                script.keys.append(self.headers["Authorization"])
                time.sleep(script.wait)
                status, kind, data = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                if 300 <= status < 400:
                    self.send_header("Location", "http://192.0.2.1/")
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client has waited long enough
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(client, "_WAIT", 0.001)
    script = Scripted()
    thread = threading.Thread(target=script.server.serve_forever, args=(0.01,))
    thread.start()
    yield script
    script.server.shutdown()
    thread.join()
    script.server.server_close()


def answer(**choice: Any) -> Answer:
    return 200, JSON, json.dumps({"choices": [choice]}).encode()


def ask(scripted: Scripted, *answers: Answer, question: Question = QUESTION, key: str | None = None) -> Reply:
    scripted.answers = list(answers)
    return Endpoint(scripted.url, "m", key, 1.0, 0, 100).ask(question, LIST_5)


CITY = Token(" city", {" city": -0.5, " town": -1.0})
LIST_5 = Form(5, echoes=False, names_ids=False)
TOP = {"tokens": [" city"], "token_logprobs": [-0.5], "top_logprobs": [{" town": -1.0}]}
CONTENT = {"content": [{"token": " city", "logprob": -0.5, "top_logprobs": [{"token": " town", "logprob": -1.0}]}]}


@pytest.mark.parametrize("logprobs", [TOP, CONTENT])
def test_log_probabilities_are_read_in_both_forms(scripted: Scripted, logprobs: Any) -> None:
    reply = ask(scripted, answer(text=" city", logprobs=logprobs), key="secret")
    assert reply.token == CITY
    assert scripted.keys == ["Bearer secret"]
    assert scripted.bodies[0] == {
        "model": "m", "max_tokens": 1, "temperature": 0, "seed": 0, "prompt": QUESTION.text, "logprobs": 5,
    }  # fmt: skip


def test_a_chat_is_asked_as_a_chat(scripted: Scripted) -> None:
    question = Question(CHAT, "Hello", (1,), (3,), (" city",))
    reply = ask(scripted, answer(message={"content": " city"}, logprobs=CONTENT), question=question)
    assert reply.token.text == " city"
    assert scripted.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]


def test_an_endpoint_without_log_probabilities_gives_its_text(scripted: Scripted) -> None:
    for echoed in ("", QUESTION.text):
        assert ask(scripted, answer(text=f"{echoed} city", logprobs=None)).token == Token(" city", {})


def test_a_busy_endpoint_is_asked_again(scripted: Scripted) -> None:
    busy = (429, JSON, b"{}")
    assert ask(scripted, busy, (503, JSON, b"{}"), answer(text=" city")).token.text == " city"
    with pytest.raises(InputError, match="too many requests .429.; set --rate"):
        ask(scripted, busy)


def test_tries_count_as_requests(scripted: Scripted) -> None:
    scripted.answers = [(429, JSON, b"{}")]
    with pytest.raises(Spent):
        Endpoint(scripted.url, "m", None, 1.0, 0, 3).ask(QUESTION, LIST_5)
    assert len(scripted.bodies) == 3


def test_prompts_and_ids_are_read_where_an_endpoint_gives_them(scripted: Scripted) -> None:
    top = [None, {"token_id:3": -0.5}, {"token_id:7": -0.25}]
    echoed = {"tokens": ["token_id:1", "token_id:3", "token_id:7"], "token_logprobs": [None, -0.5, -0.25]}
    scripted.answers = [answer(text="San Francisco is", logprobs={**echoed, "top_logprobs": top})]
    reply = Endpoint(scripted.url, "m", None, 1.0, 0, 1).ask(QUESTION, Form())
    assert scripted.bodies[0] | {"echo": True, "return_tokens_as_token_ids": True} == scripted.bodies[0]
    assert reply == Reply(
        Token("token_id:7", {"token_id:7": -0.25}), [Token("token_id:1", {}), Token("token_id:3", {"token_id:3": -0.5})]
    )


def test_prompts_of_other_tokens_are_not_asked_for_again(scripted: Scripted) -> None:
    echoed = {"tokens": ["San", " Francisco"], "token_logprobs": [None, -0.5], "top_logprobs": [None, {" city": -0.5}]}
    scripted.answers = [answer(text="San Francisco", logprobs=echoed)]
    with pytest.raises(FormRefused) as raised:
        Endpoint(scripted.url, "m", None, 1.0, 0, 1).ask(QUESTION, Form())
    assert raised.value.weaker == Form(echoes=False)


def test_a_refused_form_is_weakened_by_what_the_endpoint_names() -> None:
    form = Form().weaker("return_tokens_as_token_ids: unsupported")
    assert form == Form(20, True, False)
    assert form.weaker("echo and logprobs are not supported together") == Form(20, False, False)
    assert form.weaker("logprobs: at most 5") == Form(5, True, False)
    assert Form(0, False, False).weaker("logprobs: never") is None
    assert form.weaker("the engine died") is None


@pytest.mark.parametrize(
    ("status", "kind", "data", "error", "words"),
    [
        (200, "text/html", b"<html>Welcome", InputError, "expected JSON, found text/html: <html>Welcome"),
        (200, "text/event-stream", b"data: {}", InputError, "found a stream"),
        (200, JSON, b'{"choices": []}', InputError, "expected a completion of one choice"),
        (200, JSON, b"[1]", InputError, "expected a completion of one choice"),
        (401, JSON, b"{}", InputError, "found 401; set the variable of --key-env"),
        (404, JSON, b"not found", NotServed, "no such path"),
        (404, JSON, b"the model m does not exist", InputError, "correct --model"),
        (302, JSON, b"", InputError, "expected status 200, found 302"),
        (400, JSON, b"logprobs: at most 1", FormRefused, "listed=1"),
        (400, JSON, b"the prompt is too long", TooLong, "left out"),
        (500, JSON, b"engine\n died", InputError, "found 500: engine died"),
    ],
)
def test_what_is_no_answer_is_one_line(
    scripted: Scripted, status: int, kind: str, data: bytes, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        ask(scripted, (status, kind, data))
    assert "\n" not in str(raised.value)


def test_a_slow_endpoint_is_one_line(scripted: Scripted) -> None:
    scripted.wait = 0.3
    scripted.answers = [answer(text=" city")]
    with pytest.raises(InputError, match="expected an answer within 0.1 s, found none; raise --timeout"):
        Endpoint(scripted.url, "m", None, 0.1, 0, 1).ask(QUESTION, LIST_5)


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "http://", "http://user@host/v1"])
def test_what_is_no_url_is_one_line(url: str) -> None:
    with pytest.raises(InputError, match="expected a URL as http://localhost:8000/v1"):
        Endpoint(url, "m", None, 1, 0, 1)


def test_nobody_listens_is_one_line() -> None:
    with pytest.raises(InputError, match="expected an endpoint, found"):
        Endpoint("http://127.0.0.1:9/v1", "m", None, 1, 0, 1).ask(QUESTION, LIST_5)


def test_the_rate_is_kept(scripted: Scripted) -> None:
    scripted.answers = [answer(text=" city")]
    endpoint = Endpoint(scripted.url, "m", None, 1.0, 20, 4)
    began = time.monotonic()
    for _ in range(4):
        endpoint.ask(QUESTION, LIST_5)
    assert time.monotonic() - began >= 3 / 20
