"""Mixed requests for a soak: a seed and a number in, one HTTP request out.

It is sent, read to its end or left at a random moment, and judged.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

COMPLETED = "completed"
CANCELLED = "cancelled"
FAILED = "failed"
_TIMEOUT = 120.0  # seconds: longer than any queue here
_LONGEST_STAY = 0.4  # seconds after which a client that leaves has left: within the prompt, within the answer, after it
_TEXTS = ("Once upon a time", "What is machine learning?", "San Francisco is a", "Ice floats because")
_SCHEMA = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True)
class Sent:
    """A request. status: expected of the answer. leaves_after: seconds until its client disconnects; None: never."""

    kind: str
    path: str
    body: dict[str, Any]
    status: int = 200
    leaves_after: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a request. began, ended: `time.monotonic()`; fault: one line, of what failed."""

    kind: str
    status: str
    began: float
    ended: float
    fault: str = ""


def request(model: str, seed: int, number: int, cancelled: float) -> Sent:
    """Return the request of that number. cancelled: the share of requests whose clients leave."""
    draw = np.random.default_rng([seed, number])
    kind = str(draw.choice(list(_KINDS)))
    path, body, status = _KINDS[kind](draw)
    if path.startswith("/v1/"):
        body = {"model": model, **body}
    leaves = None
    if draw.random() < cancelled:
        leaves = float(draw.uniform(0, _LONGEST_STAY))
    return Sent(kind, path, body, status, leaves)


def slow_grammar(model: str, number: int) -> Sent:
    """Return a request whose grammar takes tens of milliseconds to compile."""
    names = [f"a{number}b{other}" for other in range(800)]
    schema = {**_SCHEMA, "properties": {name: {"type": "integer"} for name in names}, "required": names}
    body = {"model": model, "prompt": _TEXTS[0], "max_tokens": 8, "structured_outputs": {"json": schema}}
    return Sent("grammar", "/v1/completions", body)


def send(port: int, sent: Sent) -> Outcome:
    """Send a request over a new connection, and read or abandon its answer."""
    began = time.monotonic()
    try:
        if sent.leaves_after is None:
            fault = _ask(port, sent)
        else:
            fault = ""
            _leave(port, sent, sent.leaves_after)
    except (OSError, http.client.HTTPException) as error:
        fault = f"{type(error).__name__}: {error}"
    status = CANCELLED
    if fault:
        status = FAILED
    elif sent.leaves_after is None:
        status = COMPLETED
    return Outcome(sent.kind, status, began, time.monotonic(), fault and f"{sent.kind} {sent.path}: {fault}")


def _ask(port: int, sent: Sent) -> str:
    """Return the fault of the answer; "" for none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    with contextlib.closing(connection):
        connection.request("POST", sent.path, json.dumps(sent.body), {"Connection": "close"})
        answer = connection.getresponse()
        data = answer.read()
    if answer.status != sent.status:
        return f"expected HTTP {sent.status}, found {answer.status}: {data[:200].decode(errors='replace')}"
    if answer.getheader("content-type", "").startswith("text/event-stream"):
        events = [event for event in data.split(b"\n\n") if event]
        if any(event.startswith(b'data: {"error"') for event in events):
            return f"expected a stream without an error, found {events[-1][:200].decode(errors='replace')}"
        if sent.path.startswith("/v1/") and events[-1:] != [b"data: [DONE]"]:
            return "expected a stream that ends in [DONE], found one that ends without it"
    return ""


def _leave(port: int, sent: Sent, seconds: float) -> None:
    """Send, and close the connection after a while, whatever came."""
    data = json.dumps(sent.body).encode()
    head = f"POST {sent.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(seconds)


_Draw = np.random.Generator
_Made = tuple[str, dict[str, Any], int]


def _text(draw: _Draw) -> str:
    return str(draw.choice(_TEXTS))


def _new(draw: _Draw) -> int:
    return int(draw.integers(1, 65))


def _streamed(draw: _Draw) -> bool:
    return bool(draw.random() < 0.5)


def _sampling(draw: _Draw) -> dict[str, Any]:
    return {
        "temperature": float(draw.uniform(0.5, 1.5)), "top_p": float(draw.uniform(0.5, 1)),
        "top_k": int(draw.integers(1, 50)), "seed": int(draw.integers(1 << 30)),
        "frequency_penalty": float(draw.uniform(0, 1)),
    }  # fmt: skip


def _completion(draw: _Draw, **body: Any) -> _Made:
    defaults = {"prompt": _text(draw), "max_tokens": _new(draw), "temperature": 0, "stream": _streamed(draw)}
    return "/v1/completions", {**defaults, **body}, 200


def _greedy(draw: _Draw) -> _Made:
    """Return a completion of token ids; half of the prompts share a prefix, for the prefix cache."""
    front: list[int] = []
    if _streamed(draw):
        front = list(range(20, 84))
    return _completion(draw, prompt=front + draw.integers(16, 256, int(draw.integers(1, 60))).tolist())


def _grammar(draw: _Draw) -> _Made:
    number = int(draw.integers(1000))  # mostly new grammars, so that an unlimited cache of them would show
    forms: tuple[dict[str, Any], ...] = (
        {"structured_outputs": {"choice": [f"yes {number}", "no"]}},
        {"structured_outputs": {"regex": f"[a-z]{{1,9}} {number}"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "schema": {**_SCHEMA, "properties": {f"a{number}": {"type": "integer"}}, "required": [f"a{number}"]}
                },
            }
        },
    )
    return _completion(draw, **forms[int(draw.integers(len(forms)))])


def _chat(draw: _Draw) -> _Made:
    messages = [{"role": "user", "content": _text(draw)}]
    body = {"messages": messages, "max_tokens": _new(draw), "stream": _streamed(draw), **_sampling(draw)}
    return "/v1/chat/completions", body, 200


def _triton(draw: _Draw) -> _Made:
    action = "generate"
    if _streamed(draw):
        action = "generate_stream"
    model = "tensorrt_llm_bls"
    if _streamed(draw):
        model = "ensemble"
    body = {"text_input": _text(draw), "max_tokens": _new(draw), "bad_words": "", "stop_words": "", "end_id": 2}
    return f"/v2/models/{model}/{action}", body, 200


def _tokenize(draw: _Draw) -> _Made:
    """A text, a document of some 10,000 tokens, or one far beyond any model; or tokens."""
    match int(draw.integers(4)):
        case 0:
            return "/tokenize", {"prompt": _text(draw), "return_token_strs": True}, 200
        case 1:
            return "/tokenize", {"prompt": f"{_text(draw)} " * 1_500}, 200
        case 2:
            return "/tokenize", {"prompt": "~|" * 1_750_000}, 400
    return "/detokenize", {"tokens": draw.integers(16, 256, int(draw.integers(1, 20_000))).tolist()}, 200


def _wrong(draw: _Draw) -> _Made:
    wrong: tuple[dict[str, Any], ...] = (
        {"temperature": -1},
        {"structured_outputs": {"regex": "("}},
        {"prompt": [1 << 30]},
    )
    path, body, _ = _completion(draw, **wrong[int(draw.integers(len(wrong)))])
    return path, body, 400


_KINDS: dict[str, Callable[[_Draw], _Made]] = {
    "greedy": _greedy,
    "sampled": lambda draw: _completion(draw, **_sampling(draw)),
    "several": lambda draw: _completion(draw, n=int(draw.integers(2, 4)), **_sampling(draw)),
    "logprobs": lambda draw: _completion(draw, logprobs=5),
    "scores": lambda draw: _completion(draw, logprobs=1, echo=True, max_tokens=0, stream=False),
    "grammar": _grammar,
    "chat": _chat,
    "triton": _triton,
    "tokenize": _tokenize,
    "wrong": _wrong,
}
KINDS = tuple(_KINDS)
