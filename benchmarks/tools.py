"""`tools`: what tool calls cost a server that is up: `lockstep serve` of a model that has a format of calls.

Out: the time of a token of held arguments beside one of free text, in turn; CPU time of the API process's reading of an
answer with calls, for a token; and the time to the first token behind each turn of a tool loop.

The last turn's prompt must have room in the server's `max_input_len`: `--words` sets how much each turn adds. `--turns
0` is for the demo, whose template takes no results of tools.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import options
from benchmarks.measure import deliver, in_turn, ratios, spread, surroundings
from lockstep import CheckError, InputError
from lockstep.serve.answer_reader import AnswerPlan
from lockstep.serve.tool_formats import FORMATS

OPTIONS = (
    options.Option("--url", "Address of the server.", "http://127.0.0.1:8000"),
    options.number("--tokens", 128, "Tokens of an answer with held arguments, and of free text.", least=2),
    options.number("--turns", 5, "Turns of the tool loop; 0: no loop.", least=0),
    options.number("--words", 24, "How often a phrase stands in the question, and in each result of a tool."),
    options.rounds(), options.WRITE,
)  # fmt: skip
PIECE = 4  # characters of a token, where reading is measured
CALLS = 200  # of the text that is read
# As much text as there is room for: the answer ends by its length, as free text does.
NOTE = {"type": "object", "properties": {"note": {"type": "string", "minLength": 4096}}, "required": ["note"]}
TOOL = {"type": "function", "function": {"name": "write_note", "parameters": NOTE}}
HELD = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def main(url: str, tokens: int, turns: int, words: int, rounds: int, write: Path | None) -> None:
    """Measure what tool calls cost a server that is up."""
    server = _Server(url)
    ask = [{"role": "user", "content": "Write a long note on the weather in Paris."}]
    bodies: Mapping[str, Any] = {
        "free": {"messages": ask, "max_tokens": tokens, "ignore_eos": True},
        "held": {"messages": ask, "max_tokens": tokens, **HELD},
    }
    # The schema stands in the prompt: free text is to have as long a one.
    lengths = {name: server.chat(body).prompt_tokens for name, body in bodies.items()}
    ask = [{"role": "user", "content": ask[0]["content"] + " so" * (lengths["held"] - lengths["free"])}]
    bodies["free"]["messages"] = ask
    times = in_turn(
        {name: lambda body=body: server.chat(body).seconds_per_token for name, body in bodies.items()}, rounds
    )
    record: dict[str, Any] = {
        "benchmark": "tools",
        "model": server.model,
        "tokens": tokens,
        "seconds_per_token": {name: spread(values) for name, values in times.items()},
        "ratios": ratios(times, "free"),
        "reading_cpu_microseconds_per_token": {name: round(_reading(name), 3) for name in ("hermes", "mistral_args")},
    }
    if turns:
        loops = [_loop(server, turns, words, number) for number in range(rounds)]
        each = [spread([loop[turn] for loop in loops]) for turn in range(turns)]
        last = round(each[-1]["median"] / each[min(1, turns - 1)]["median"], 3)
        record |= {"words": words, "ttft_seconds_behind_turn": each, "ttft_of_the_last_turn_to_the_second": last}
    record["surroundings"] = surroundings("numpy", "starlette", "uvicorn", "llguidance")
    deliver(record, write)


class _Answer(NamedTuple):
    ttft: float  # seconds
    seconds_per_token: float  # after the first
    prompt_tokens: int


class _Server:
    """The server, one request at a time."""

    def __init__(self, url: str):
        self._address = urlsplit(url).netloc
        self.model = json.loads(self._request("GET", "/v1/models").read())["data"][0]["id"]

    def _request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address, timeout=600)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
        except OSError as error:
            raise InputError(
                f"--url: expected a server at {self._address}, found {error}; start one: lockstep serve TARGET"
            ) from None
        if answer.status != 200:
            raise CheckError(f"{path}: expected status 200, found {answer.status}: {answer.read().decode()[:300]}")
        return answer

    def chat(self, body: Mapping[str, Any]) -> _Answer:
        """Ask for an answer, as a stream."""
        stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        began, first, last, count, prompt_tokens = time.perf_counter(), 0.0, 0.0, 0, 0
        answer = self._request(
            "POST", "/v1/chat/completions", {"model": self.model, "temperature": 0, **body, **stream}
        )
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            if made := (event.get("usage") or {}).get("completion_tokens"):
                first = first or now
                last, count, prompt_tokens = now, made, event["usage"]["prompt_tokens"]
        return _Answer(first - began, (last - first) / max(1, count - 1), prompt_tokens)


def _loop(server: _Server, turns: int, words: int, number: int) -> list[float]:
    """Return the seconds to the first token of each turn; each has the turns before it as its prefix."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Loop {number}: " + "how is it? " * words}]
    found = []
    for turn in range(turns):
        found.append(server.chat({"messages": messages, "max_tokens": 4, "tools": [TOOL]}).ttft)
        call = {"name": "write_note", "arguments": json.dumps({"note": str(turn)})}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": "it is so. " * words})
    return found


def _reading(name: str) -> float:
    """Return the CPU microseconds that a token of an answer with calls takes to read."""
    arguments = json.dumps({"note": "It rains in Paris, and not in Berlin. " * 8})
    values = {"\0name": "write_note", "\0arguments": arguments}
    format = FORMATS[name]
    call = "".join(values.get(part, part) for part in format.call)
    text = f"Let me write it down. {call * CALLS}"
    plan = AnswerPlan(format=format, tools={"write_note": NOTE})
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    reader, began = plan.reader(True), time.process_time()
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    taken = time.process_time() - began
    assert reader.num_calls == CALLS
    return 1e6 * taken / len(pieces)
