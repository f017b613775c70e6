"""The running totals of queue and slots against a plain recount, and what a full queue answers by either.

The service is the real one. Its engine is played: hypothesis draws its messages and their times.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from demo_model import DEMO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.runtime import Tokenizer
from lockstep.runtime.request import Request
from lockstep_serve.app import application
from lockstep_serve.frames import Abort, Add, Counters, Frame, Ready, Refused, Step
from lockstep_serve.service import Service
from lockstep_serve.settings import EngineOptions, ServedModelOptions, ServiceLimits, ServiceOptions
from lockstep_serve.stream import PromptRequest, Stream, StreamError

SLOTS = 3
LIMITS = ServiceLimits(max_queue=4, max_queue_tokens=40)
READY = Ready(
    identity="0" * 64, backend="played", batch_invariant=True, engine_digest="0" * 64, vocab_size=512,
    eos_token_ids=(0,), max_batch_size=SLOTS, max_seq_len=64, max_input_len=64, max_num_tokens=64, chunk_size=64,
    prefix_caching=False, num_pages=8, prompt_logprobs=False, verifies_drafts=True, adapters={}, lost_adapters={},
)  # fmt: skip


class Played:
    """The engine's end: the requests that it has and that have not ended, {number: choices}."""

    def __init__(self) -> None:
        self.has: dict[int, set[int]] = {}

    def send(self, frame: Frame) -> None:
        if isinstance(frame, Add):
            request = frame.request
            self.has[frame.id] = set(range(request.choice, request.choice + request.n))
        elif isinstance(frame, Abort):
            self.end(frame.id, frame.choice)

    def end(self, number: int, choice: int | None) -> None:
        choices = self.has.get(number, set())
        choices.discard(choice) if choice is not None else choices.clear()
        if not choices:
            self.has.pop(number, None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "tokenizer.json")


def service_of(tokenizer: Tokenizer) -> tuple[Service, Played]:
    options = EngineOptions("", "", "", "all", {})
    service = Service(ServiceOptions([ServedModelOptions("played", tokenizer)], options, LIMITS))
    played = Played()
    # type: ignore[assignment]
    service.link = played
    service.first_frame = READY
    service.tokens_per_s = 7.0
    return service, played


class Totals(NamedTuple):
    waiting: int = 0
    prompt_tokens: int = 0
    backlog_tokens: int = 0
    running: int = 0


def totals(service: Service) -> Totals:
    return Totals(service.num_waiting, service.waiting_tokens, service.backlog_tokens, service.num_running)


def recount(service: Service) -> Totals:
    prompts: list[PromptRequest] = []
    for stream in service.streams:
        prompts += stream.prompts
    waiting = [prompt.request for prompt in prompts if prompt.admitted is None]
    tokens = sum(len(request.prompt_ids) for request in waiting)
    return Totals(
        len(waiting),
        tokens,
        tokens + sum(request.n * request.max_new_tokens for request in waiting),
        sum(len(prompt.choices) for prompt in prompts if prompt.admitted is not None),
    )


def refusal(service: Service, prompts: list[PromptRequest]) -> tuple[int, int | None] | None:
    """Return status and Retry-After by the recount; None where there is room."""
    counts = recount(service)
    number = len(prompts)
    tokens = counts.prompt_tokens + sum(len(prompt.request.prompt_ids) for prompt in prompts)
    if number > LIMITS.max_queue + SLOTS:
        return 400, None
    over = counts.waiting + number > LIMITS.max_queue + max(0, SLOTS - counts.running)
    if over or (counts.waiting and tokens > LIMITS.max_queue_tokens):
        return 429, min(60, max(1, round(counts.backlog_tokens / service.tokens_per_s)))
    return None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_totals_are_those_of_a_recount_whatever_comes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    service, played = service_of(tokenizer)
    streams: list[Stream] = []

    def pick(values: Iterable[Any]) -> Any:
        return data.draw(st.sampled_from(sorted(values)))

    def submit() -> None:
        lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=LIMITS.max_queue + SLOTS + 1))
        n = data.draw(st.integers(1, 3))
        limit = data.draw(st.integers(1, 30))
        stop = data.draw(st.sampled_from([(), ("a",)]))
        prompts = [PromptRequest(Request([5] * length, limit, n=n), stop) for length in lengths]
        expected = refusal(service, prompts)
        try:
            streams.append(service.submit(prompts, service.default))
            stream_error = None
        except StreamError as error:
            stream_error = error.status, error.retry_after
        assert stream_error == expected

    def frame(**options: Any) -> None:
        service.handle_frame(Step(Counters(), **options))

    def token() -> None:
        number = pick(played.has)
        choice = pick(played.has[number])
        finish = data.draw(st.sampled_from([None, None, "stop_id", "error"]))
        if finish:
            played.end(number, choice)
        admitted = [(number, 0)] if data.draw(st.booleans()) else []
        frame(admitted=admitted, tokens=[(number, choice, -1 if finish == "error" else 68, finish, None)])

    def cancel() -> None:
        streams[pick(range(len(streams)))].cancel()

    def fail() -> None:
        service.fail(streams[pick(range(len(streams)))], StreamError("it waited", 503))

    def die() -> None:
        played.has.clear()
        service.supervisor.record_crash()
        if data.draw(st.booleans()):
            service.supervisor.crashes.clear()
        service.supervisor.resubmit()

    for _ in range(data.draw(st.integers(1, 25))):
        events = {"submit": submit}
        if played.has:
            events |= {
                "admit": lambda: frame(admitted=[(pick(played.has), 0)]),
                "token": token,
                "refuse": lambda: service.handle_frame(Refused(pick(played.has), "no")),
                "die": die,
            }
        if streams:
            events |= {"cancel": cancel, "fail": fail}
        events[pick(events)]()
        assert totals(service) == recount(service)
    service.fail_all(StreamError("the end"))
    assert totals(service) == Totals() and not service.prompts


def test_a_refused_request_is_gone_when_it_is_answered(tokenizer: Tokenizer) -> None:
    """What only a garbage collection finds makes collections long, and all requests wait for them."""
    service, _ = service_of(tokenizer)
    for _ in range(LIMITS.max_queue + SLOTS):
        service.submit([PromptRequest(Request([5], 30))], service.default)
    sent = []

    async def ask() -> None:
        body = json.dumps({"prompt": [[5], [6]], "max_tokens": 3}).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        await application(service)(scope, receive, send)

    def count_requests() -> int:
        return sum(isinstance(item, PromptRequest) for item in gc.get_objects())

    before = count_requests()
    gc.disable()
    try:
        asyncio.run(ask())
        assert sent[0]["status"] == 429 and count_requests() == before
    finally:
        gc.enable()
