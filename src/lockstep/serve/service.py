"""The service between front ends and engine: streams of requests, and a new engine for all where one dies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.errors import CheckError, LockstepError
from lockstep.runtime.request import NOT_FINITE, Request
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.adapters import Adapters
from lockstep.serve.chat import Chat
from lockstep.serve.ended_requests import Observer
from lockstep.serve.frames import Frame, Ready
from lockstep.serve.link import EngineLink
from lockstep.serve.metrics import Infos, Metrics
from lockstep.serve.reasoning import reasoning_format
from lockstep.serve.say import fault_of, say
from lockstep.serve.settings import EngineOptions, ServiceLimits
from lockstep.serve.stream import TENANT, PromptRequest, Stream, StreamError
from lockstep.serve.tool_formats import tool_format
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Logprobs

_FORGIVEN = 60.0  # seconds after which a death of the engine no longer counts
_TOTALS = ("prefix_queries", "prefix_hits", "swaps")  # counters that only grow
_ERRORS = ("error", "grammar_error")  # ends that are none of an answer
_PATIENCE = 30.0  # most seconds between two starts that fail


class Service:
    """The requests of all front ends, and the engine behind them."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        engine_options: EngineOptions,
        limits: ServiceLimits,
        metrics_prefix: str = "lockstep",
        chat_template: ChatTemplate | None = None,
        log: Callable[[str], None] = say,
        observers: Sequence[Observer] = (),
        adapter_root: Path | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ):
        """Describe the service; `start` starts its engine.

        name: of the model, in requests. engine_options: of the engine process (see `EngineLink.start`).
        chat_template: None where chats are refused. log: gets a line when the engine dies, and when it does not start
        again. observers: get what front ends know of each request when it has ended. adapter_root: as of `Adapters`.
        tool_call_parser, reasoning_parser: names of formats; None: as the chat template tells. Raises InputError for an
        unknown one.
        """
        self.name = name
        self.tokenizer = tokenizer
        self.limits = limits
        self.chat = Chat(chat_template)
        template = chat_template.template if chat_template else None
        self.tool_format = tool_format(tool_call_parser, template)
        self.reasoning_format = reasoning_format(reasoning_parser, template)
        self._ready: Ready | None = None
        self.counters: Frame = {}  # its last
        self._earlier: dict[str, int] = dict.fromkeys(_TOTALS, 0)  # what engines that died had counted
        self._earlier_drafts: list[int] = []
        self.draining = False
        self.restarts = 0
        self.created = int(time.time())
        self.metrics = Metrics(name, self._read(), self._infos(), self.drafts, metrics_prefix)
        self.observers = observers
        self.engine_options = engine_options
        self._log = log
        self.adapters = Adapters(name, adapter_root, self._is_used)
        self._link: EngineLink | None = None
        self._restarting = False  # an engine that is ready is awaited, and no start of it has failed
        self._numbers = itertools.count()
        self._prompts: dict[int, PromptRequest] = {}  # by their numbers in the engine process
        self._streams: set[Stream] = set()
        # Of `_streams`, so that it is known without a walk whether a request finds room: prompts that are not admitted,
        # their tokens, these with those that their answers may have, and answers of admitted prompts.
        self._waiting = self._waiting_tokens = self._backlog_tokens = self._running = 0
        self._deaths: deque[float] = deque()
        self._tasks: list[asyncio.Task] = []
        self._fault: CheckError | None = None
        self.ended = asyncio.Event()  # by a fault of its own: it serves nobody any more
        self._rate = 0.0  # tokens a second, of prompts and answers, of late
        self._rate_at = time.monotonic()
        self._counted = 0

    async def start(self) -> None:
        """Start the engine, and return when it is ready. Raises LockstepError."""
        await self.chat.start()
        self.tokenizer.min_tokens(0)  # reads the vocabulary, for which no request is to wait
        await self._open()
        for name, task in (("supervise", self._supervise()), ("watch", self._watch())):
            self._tasks.append(asyncio.create_task(task, name=name))
            self._tasks[-1].add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task) -> None:
        """End the service with a task without which requests would wait for ever."""
        if task.cancelled():
            return
        error = task.exception()
        said = fault_of(error) if error else "it returned"
        self._fault = CheckError(f"server: expected its task {task.get_name()} to run, found {said}")
        self.ended.set()
        self._fail_all(StreamError("the server failed; its log says why"))

    def check(self) -> None:
        """Raise CheckError where a fault of the service itself has ended it."""
        if self._fault is not None:
            raise self._fault

    @property
    def ready(self) -> Ready:
        """Return what the engine says of itself; of a service that was started."""
        assert self._ready is not None
        return self._ready

    async def stop(self) -> None:
        """End the engine, and all requests that have not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(StreamError("the server is shutting down", 503, "shutting_down"))
        await self.chat.stop()
        if self._link is not None:
            await self._link.stop()

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait up to `seconds` for the running ones."""
        self.draining = True
        end = time.monotonic() + seconds
        while self._streams and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _is_used(self, name: str) -> bool:
        return any(prompt.request.adapter == name for each in self._streams for prompt in each.prompts)

    @property
    def is_ready(self) -> bool:
        """Return whether requests are taken."""
        return self._link is not None and not self.draining and self._fault is None

    @property
    def heartbeat_age(self) -> float | None:
        """Return the seconds since the engine's last sign of life; None without engine."""
        return None if self._link is None else time.monotonic() - self._link.last_frame

    @property
    def is_live(self) -> bool:
        """Return whether the service runs, and its engine shows signs of life or is being started."""
        age = self.heartbeat_age
        return self._fault is None and (age is None or age < self.limits.stall)

    def total(self, name: str) -> int:
        """Return a counter over all engines: prefix_queries and prefix_hits count tokens, swaps requests."""
        return self._earlier[name] + self.counters.get(name, 0)

    def drafts(self) -> list[int]:
        """Return `Speculation.counts` over all engines; nothing without speculation."""
        now = self.counters.get("speculative", ())
        return [sum(pair) for pair in itertools.zip_longest(self._earlier_drafts, now, fillvalue=0)]

    def _read(self) -> dict[str, Callable[[], float]]:
        """Return what the metrics read, by the name of its series."""
        return {
            "num_requests_running": lambda: self.counters.get("running", 0),
            "num_requests_waiting": lambda: self.counters.get("waiting", 0),
            "kv_cache_usage_perc": self._used_pages,
            "engine_up": lambda: int(self.is_ready),
            "engine_restarts": lambda: self.restarts,
            "num_preemptions": lambda: self.total("swaps"),
            "prefix_cache_queries": lambda: self.total("prefix_queries"),
            "prefix_cache_hits": lambda: self.total("prefix_hits"),
        }

    def _infos(self) -> Infos:
        """Return what the metrics tell by labels, by the name of its series."""
        return {"cache_config_info": self._cache_config, "lora_requests_info": self._used_adapters}

    def _cache_config(self) -> tuple[dict[str, str], float] | None:
        if self._ready is None:
            return None
        ready = self._ready
        labels = {"block_size": str(PAGE_SIZE), "num_gpu_blocks": str(ready.num_pages)}
        return labels | ({"cache_dtype": ready.kv_cache_dtype} if ready.kv_cache_dtype else {}), 1.0

    def _used_adapters(self) -> tuple[dict[str, str], float] | None:
        most = len(self.adapters.model_names) - 1
        if not most:
            return None
        prompts = [prompt for stream in self._streams for prompt in stream.prompts if prompt.request.adapter]
        running, waiting = (
            ",".join(sorted({str(each.request.adapter) for each in prompts if (each.admitted is None) == waits}))
            for waits in (False, True)
        )
        labels = {"max_lora": str(most), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        return labels, time.time()

    def _used_pages(self) -> float:
        free = self.counters.get("free_pages")
        return 0.0 if free is None else 1 - free / self.ready.num_pages

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def engine_pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    def submit(self, prompts: Sequence[PromptRequest]) -> Stream:
        """Queue prompts, and return the stream of their answers. Raises StreamError."""
        if self.draining:
            raise StreamError("the server is shutting down; try another one", 503, "shutting_down")
        if self._fault is not None:
            raise StreamError("the server failed; its log says why", 503, "server_failed")
        if self._link is None and not self._restarting:
            raise StreamError("the engine does not start; try again", 503, "engine_starting", retry_after=1)
        self._check_room(prompts)  # before anything is made: a refusal under overload is to cost little
        if tenant := TENANT.get():
            for prompt in prompts:
                prompt.request = _salted(prompt.request, tenant)
        stream = Stream(prompts, self.tokenizer)
        self._streams.add(stream)
        for prompt in prompts:
            self._count_waiting(prompt, 1)
            if self._link is None:  # it goes to the next engine with those that the last one had
                continue
            prompt.number = next(self._numbers)
            self._prompts[prompt.number] = prompt
            self._link.add(prompt.number, prompt.request)
        return stream

    def cancel(self, stream: Stream) -> None:
        """End what has not ended of a stream; it holds no slot in the next step."""
        for prompt in stream.prompts:
            if prompt.choices:
                self._abort(prompt)
                for choice in sorted(prompt.choices):
                    self._finish(prompt, choice, "abort")
                    stream.push(prompt.first + choice, "", None, None, "abort")
        self._leave(stream)

    def _check_room(self, prompts: Sequence[PromptRequest]) -> None:
        number = len(prompts)
        most = self.limits.max_queue + self.ready.max_batch_size
        if number > most:  # for ever: "try again" would be no help
            room = f"({self.limits.max_queue} that wait and {self.ready.max_batch_size} that run)"
            said = f"prompt: expected at most {most} prompts {room}, found {number}; send fewer"
            raise StreamError(said, 400, "request_too_large", param="prompt")
        tokens = self._waiting_tokens + sum(len(prompt.request.prompt_ids) for prompt in prompts)
        # What fits into free slots does not wait.
        free = self.limits.max_queue + max(0, self.ready.max_batch_size - self._running)
        if self._waiting + number > free or (self._waiting and tokens > self.limits.max_queue_tokens):
            after = min(60, max(1, round(self._backlog_tokens / self._rate))) if self._rate else 1
            self.metrics.refused.inc()
            waits = f"{self._waiting} requests of {self._waiting_tokens} prompt tokens wait"
            most_of = f"(at most {self.limits.max_queue} and {self.limits.max_queue_tokens})"
            said = f"the queue is full: {waits} {most_of}; try again in {after} s"
            raise StreamError(said, 429, "queue_full", after)

    def _count_waiting(self, prompt: PromptRequest, sign: int) -> None:
        request = prompt.request
        tokens = len(request.prompt_ids)
        self._waiting += sign
        self._waiting_tokens += sign * tokens
        self._backlog_tokens += sign * (tokens + request.n * request.max_new_tokens)

    async def _open(self) -> None:
        options = replace(self.engine_options, loaded=self.adapters.to_load())
        link, self._ready = await EngineLink.start(options, self.limits.start)
        for line in self.adapters.engine_started(link, self._ready):
            self._log(line)
        self._link = link
        self.counters = {"running": 0, "waiting": 0, "free_pages": self.ready.num_pages, "cached_pages": 0}

    async def _supervise(self) -> None:
        while True:
            assert self._link is not None
            try:
                words = await self._link.run(self._take)
                said = words["message"] if words else None
            except Exception as error:  # a frame that cannot be handled: another engine may send others
                said = f"what it sent cannot be handled: {fault_of(error)}"
            died = self._link
            self._link = None
            self.adapters.engine_died()
            for name in _TOTALS:
                self._earlier[name] += self.counters.get(name, 0)
            self._earlier_drafts = self.drafts()
            self.counters = {}
            code = await died.stop()
            self._log(f"engine process {died.pid} died: {said or f'it ended with code {code}'}; starting another")
            self._bury()
            self._restarting = True
            pause = 0.5
            while self._link is None:
                try:
                    await self._open()
                except (LockstepError, OSError) as error:
                    self._restarting = False
                    self._log(f"the engine does not start: {error}")
                    self._fail_all(StreamError("the engine died and does not start again"))
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _PATIENCE)
            self.restarts += 1
            self._bring_again()

    def _bury(self) -> None:
        """Note a death of the engine; fail requests of two deaths, and all at the second in `_FORGIVEN` s."""
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > _FORGIVEN:
            self._deaths.popleft()
        self._deaths.append(now)
        for stream in list(self._streams):
            for prompt in stream.prompts:
                prompt.deaths += bool(prompt.choices)
            if any(prompt.deaths > 1 for prompt in stream.prompts):
                self._fail(stream, StreamError("the engine died twice while it was at this request"))
            elif len(self._deaths) > 1:
                self._fail(stream, StreamError("the engine died twice within a minute"))

    def _bring_again(self) -> None:
        """Send all unfinished requests, with the tokens given out, to the new engine, by choice."""
        assert self._link is not None
        self._prompts.clear()
        for stream in self._streams:
            for prompt in stream.prompts:
                prompt.resumed.clear()
                request = prompt.request
                given = prompt.collector.completion.choices
                if len(prompt.prompt_logprobs) < len(request.prompt_ids) - 1:
                    prompt.prompt_logprobs.clear()
                elif request.max_new_tokens:
                    request = replace(request, prompt_logprobs=None)
                if len(prompt.choices) == request.n and not any(choice.token_ids for choice in given):
                    prompt.number = next(self._numbers)
                    self._prompts[prompt.number] = prompt
                    self._link.add(prompt.number, request)
                    continue
                for choice in sorted(prompt.choices):
                    number = prompt.resumed[choice] = next(self._numbers)
                    answer = given[choice].token_ids
                    self._prompts[number] = prompt
                    self._link.add(number, replace(request, n=1, choice=request.choice + choice, answer_ids=answer))

    def _take(self, frame: Frame) -> None:
        if frame["type"] in ("loaded", "not_loaded"):
            return self.adapters.engine_answered(frame)
        if frame["type"] == "refused":
            if found := self._prompts.get(frame["id"]):
                code = "invalid_grammar" if frame["param"] else "request_too_large"
                self._fail(found.stream, StreamError(frame["message"], 400, code, param=frame["param"]))
            return
        self.counters = frame
        now = time.monotonic()
        for number, cached in frame.get("admitted", ()):
            if (found := self._prompts.get(number)) and found.admitted is None:
                self._count_waiting(found, -1)
                self._running += len(found.choices)
                found.admitted = now
                found.num_cached_tokens = cached
                self.metrics.queue_time.observe(now - found.arrived)
                self.metrics.prompt_tokens.inc(num_tokens := len(found.request.prompt_ids))
                self._counted += num_tokens
                found.stream.wake()
        for number, first, entries in frame.get("prompts", ()):
            # Not twice, where several choices of it were resumed.
            if (found := self._prompts.get(number)) and first == len(found.prompt_logprobs) + 1:
                found.prompt_logprobs += map(_logprobs, entries)
        counted = 0
        for number, choice, token, finish, *logprobs in frame.get("tokens", ()):
            if found := self._prompts.get(number):
                try:
                    counted += self._token(found, choice, token, finish, logprobs, now)
                except Exception as error:  # of this answer: the others of the step go on
                    self._log(f"a token cannot be handled: {fault_of(error)}")
                    self._fail(found.stream, StreamError("the server failed; its log says why"))
        if counted:
            self._counted += counted
            self.metrics.generation_tokens.inc(counted)

    def _token(
        self, prompt: PromptRequest, number: int, token: int, finish: str | None, logprobs: Sequence[Any], now: float
    ) -> bool:
        """Take a token, or an answer's end; return whether it is a token of a request that is still there."""
        choice = number - prompt.request.choice
        if choice not in prompt.choices:
            return False
        found = _logprobs(logprobs) if logprobs else None
        stream = prompt.stream
        text = prompt.collector.add(choice, token, finish, found)
        is_token = token >= 0
        if is_token:
            self.metrics.token(now, prompt)
            prompt.last_token = now
            if stream.first_token is None:
                stream.first_token = now
        ended = prompt.collector.completion.choices[choice].finish
        if ended in _ERRORS:
            self._fail_at(prompt, ended)
            return is_token
        stream.push(prompt.first + choice, text, token if is_token else None, found, ended)
        if not ended:
            return is_token
        if ended == "stop_string" and not finish and self._link is not None:
            # Its own number where it was resumed; the engine has one choice there.
            self._link.abort(prompt.resumed.get(choice, prompt.number), number)
        self._finish(prompt, choice, ended)
        if stream.done:
            self._leave(stream)
        return is_token

    def _fail_at(self, prompt: PromptRequest, ended: str) -> None:
        """End a stream for an error that the engine found at one of its tokens."""
        if ended == "error":
            error = StreamError(f"{NOT_FINITE}; the request was ended")
        else:
            grammar = prompt.request.grammar
            where = grammar.name if grammar else "grammar"
            said = f"{where}: the answer came to where it is too complex; simplify it"
            # Not 500: a client that tries again gets no further with the same grammar.
            error = StreamError(said, 400, ended, param=where)
        self._fail(prompt.stream, error)

    def _finish(self, prompt: PromptRequest, choice: int, reason: str | None) -> None:
        """End a choice; reason: None where it is counted as no answer."""
        prompt.choices.remove(choice)
        self._running -= prompt.admitted is not None
        if reason is not None:
            self.metrics.finished(reason)
        self._prompts.pop(prompt.resumed.pop(choice, -1), None)
        if not prompt.choices:
            self._prompts.pop(prompt.number, None)

    def _abort(self, prompt: PromptRequest) -> None:
        """Have the engine end what it has of a prompt."""
        for number in list(prompt.resumed.values()) or [prompt.number]:
            self._prompts.pop(number, None)
            if prompt.choices and self._link is not None:
                self._link.abort(number)

    def _leave(self, stream: Stream) -> None:
        if stream in self._streams:
            self._streams.discard(stream)
            for prompt in stream.prompts:
                if prompt.admitted is None:
                    self._count_waiting(prompt, -1)
            if not _is_refused(stream):
                self.metrics.latency.observe(time.monotonic() - stream.began)

    def _fail(self, stream: Stream, error: StreamError) -> None:
        stream.fail(error)
        for prompt in stream.prompts:
            self._abort(prompt)
            for choice in list(prompt.choices):
                self._finish(prompt, choice, None if _is_refused(stream) else "error")
        self._leave(stream)

    def _fail_all(self, error: StreamError) -> None:
        for stream in list(self._streams):
            self._fail(stream, error)

    async def _watch(self) -> None:
        """End, once a second, requests that waited too long, unread streams, and an engine without a sign of life."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.queue_timeout / 2, self.limits.stall / 2))
            now = time.monotonic()
            self._measure(now)
            for stream in list(self._streams):
                if not stream.is_admitted and now - stream.began > self.limits.queue_timeout:
                    limit = self.limits.queue_timeout
                    waited = f"the request waited for {now - stream.began:.0f} s (at most {limit:g})"
                    self._fail(stream, StreamError(waited, 503, "queue_timeout", 1))
                elif stream.sending_since is not None and now - stream.sending_since > self.limits.slow_reader:
                    self.cancel(stream)
            if self._link is not None and now - self._link.last_frame > self.limits.stall:
                self._log(f"engine process {self._link.pid} gave no sign of life for {self.limits.stall:g} s")
                self._link.kill()

    def _measure(self, now: float) -> None:
        elapsed = now - self._rate_at
        if self._counted and elapsed > 0.5:
            rate = self._counted / elapsed
            self._rate = rate if not self._rate else 0.7 * self._rate + 0.3 * rate
        self._rate_at = now
        self._counted = 0


def _logprobs(entry: Sequence[Any]) -> Logprobs:
    return Logprobs(entry[0], tuple(map(tuple, entry[1])))


def _is_refused(stream: Stream) -> bool:
    """Return whether a stream ended for what its client asked for: in no series."""
    return stream.error is not None and stream.error.status == 400


def _salted(request: Request, tenant: str) -> Request:
    """Return a tenant's request, with a salt that parts its prefixes from others'."""
    return replace(request, cache_salt=f"{tenant}/{request.cache_salt}")
