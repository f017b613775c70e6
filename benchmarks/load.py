"""Send requests of token ids to a server of OpenAI's API, at times that are drawn beforehand.

To load a server, use AIPerf (docs/load.md). It lacks two things: prompts of token ids, which need no tokenizer, for a
model of random weights; and times measured from when a request was due, which include the waits behind a slow server.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import numpy as np

from lockstep import CheckError

TIMEOUT = 600.0  # seconds for all requests
CLIENT_TICK = 0.01  # seconds between two looks at how late this program itself is


@dataclass(eq=False)
class Answer(asyncio.Protocol):
    """One request on one connection.

    Times are `time.perf_counter()`: due, sent, pieces (when text came), end. output_tokens: as the server counts them.
    """

    request: bytes
    due: float
    sent: float = 0.0
    end: float = 0.0
    pieces: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str = ""

    def connection_made(self, transport: Any) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)
        self.rest = b""
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.end = time.perf_counter()
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        *lines, self.rest = (self.rest + body).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            self.output_tokens = (event.get("usage") or {}).get("completion_tokens", self.output_tokens)
            if any(choice.get("text") for choice in event.get("choices", ())):
                self.pieces.append(self.end)

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        if status != 200 or not self.output_tokens:
            self.error = f"status {status}, {self.output_tokens} tokens"
        self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.error and not self.done.done():
            self.error = "the connection was closed"
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def load(url: str, prompt: int, new: int, rate: float, requests: int, seed: int = 0) -> dict[str, float]:
    """Send `requests` prompts of `prompt` token ids for `new` tokens, and return figures.

    rate: requests a second, at exponential distances; infinity: all at once. Times are in ms, `duration_s` and rates
    over the whole run; `itl` are the gaps between pieces of text of all requests, `tpot` is one number a request.

    Raises CheckError where a request fails.
    """
    with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT) as models:
        model = json.load(models)["data"][0]["id"]
    draw = np.random.default_rng(seed)
    gaps = np.zeros(requests) if math.isinf(rate) else draw.exponential(1 / rate, requests)
    body = {"model": model, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    prompts = draw.integers(16, 256, (requests, prompt)).tolist()  # ids that every vocabulary has
    bodies = [json.dumps({**body, "prompt": ids}).encode() for ids in prompts]
    answers, lags = asyncio.run(asyncio.wait_for(_send(url, bodies, np.cumsum(gaps) - gaps[0]), TIMEOUT))
    return _figures(answers, new) | {"client_lag_p99_s": float(np.percentile(lags, 99))}


async def _send(url: str, bodies: Sequence[bytes], arrivals: np.ndarray) -> tuple[list[Answer], list[float]]:
    """Send each request when it is due. Returns the answers, and how late this program was."""
    parts = urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    start = time.perf_counter() + 0.05
    lags: list[float] = []

    async def ask(body: bytes, arrival: float) -> Answer:
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        answer = Answer(request, start + arrival)
        await asyncio.sleep(answer.due - time.perf_counter())
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: answer, parts.hostname, parts.port)
        await answer.done
        transport.close()
        return answer

    async def watch() -> None:
        while True:
            due = time.perf_counter() + CLIENT_TICK
            await asyncio.sleep(CLIENT_TICK)
            lags.append(time.perf_counter() - due)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(*(ask(body, arrival) for body, arrival in zip(bodies, arrivals)))
    watching.cancel()
    return answers, lags or [0.0]


def _figures(answers: Sequence[Answer], new: int) -> dict[str, float]:
    failed = [answer for answer in answers if answer.error or answer.output_tokens != new]
    if failed:
        raise CheckError(f"load: {len(failed)} of {len(answers)} requests failed, the first: {failed[0].error}")
    duration = max(answer.end for answer in answers) - min(answer.due for answer in answers)
    times = {
        "latency": [answer.end - answer.due for answer in answers],
        "ttft": [answer.pieces[0] - answer.due for answer in answers if answer.pieces],
        "tpot": [(answer.pieces[-1] - answer.pieces[0]) / max(new - 1, 1) for answer in answers if answer.pieces],
        "itl": np.concatenate([np.diff(answer.pieces) for answer in answers]),
        "send_delay": [answer.sent - answer.due for answer in answers],
    }
    figures = {"completed": float(len(answers)), "duration_s": duration}
    figures |= {"requests_per_s": len(answers) / duration, "output_tokens_per_s": len(answers) * new / duration}
    for name, seconds in times.items():
        milliseconds = 1000 * np.asarray(seconds)
        if not milliseconds.size:  # one piece has no gaps
            continue
        figures[f"{name}_mean_ms"] = float(milliseconds.mean())
        figures |= {f"{name}_p{at}_ms": float(np.percentile(milliseconds, at)) for at in (50, 99)}
        figures[f"{name}_max_ms"] = float(milliseconds.max())
    return figures
