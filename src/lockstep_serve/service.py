"""The service between APIs and engine: streams of requests, which survive the death of an engine process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.errors import CheckError
from lockstep.runtime.request import NOT_FINITE, Request
from lockstep.step.sampling import Logprobs
from lockstep_serve.adapters import Adapters, one_of
from lockstep_serve.bodies import BadRequest
from lockstep_serve.chat import Chat
from lockstep_serve.ended_requests import Observer
from lockstep_serve.frames import Abort, Add, Counters, Frame, Loaded, Ready, Refused, Step, WeightsUpdated
from lockstep_serve.link import EngineLink
from lockstep_serve.log import fault_of, log
from lockstep_serve.metrics import Metrics, ModelMetrics
from lockstep_serve.served_model import ServedModel
from lockstep_serve.settings import ServiceOptions
from lockstep_serve.spawn import EngineProcess
from lockstep_serve.stream import OPENED_MODELS, TENANT, PromptRequest, Stream, StreamError
from lockstep_serve.supervisor import Supervisor
from lockstep_serve.weight_updates import WeightUpdates

_ERRORS = ("error", "grammar_error")  # finish reasons that fail the request
_MAX_RETRY_AFTER_S = 60


class Service:
    """The requests of all APIs, and the engine that runs them."""

    def __init__(
        self, options: ServiceOptions, observers: Sequence[Observer] = (), engine: EngineProcess | None = None
    ):
        """Create the service; `start` starts its engine.

        observers: called with each request that has ended. engine: a process to start with. Raises InputError for an
        unknown name of a format.
        """
        self.name = options.models[0].name
        self.limits = options.limits
        self.first_frame: Ready | None = None
        self.counters: Counters = Counters()  # of the engine's last step
        self._earlier = Counters()  # totals of the engines that died
        self.draining = False
        self.restarts: int = 0
        self.created = int(time.time())
        self.metrics = Metrics(self, options.metrics_prefix)
        self.observers = observers
        self.engine_options = options.engine
        self.weights = WeightUpdates(self, options.weights_root)
        self.chats: list[Chat] = []
        self.models: dict[str, ServedModel] = {}
        for model in options.models:
            chat = self._chat(model.chat_template)
            checkpoint = model.name if self.models else ""
            adapters = Adapters(model.name, checkpoint, options.adapter_root, self._is_used)
            metrics = ModelMetrics(self.metrics, model.name)
            self.models[model.name] = ServedModel(self, model, checkpoint, chat, adapters, metrics)
        self.link: EngineLink | None = None  # None while an engine starts
        self.supervisor = Supervisor(self, engine)
        self._numbers = itertools.count()
        self.prompts: dict[int, PromptRequest] = {}  # by their numbers in the engine process
        self.streams: set[Stream] = set()
        # Counters, updated as prompts come and go: under overload, a refusal must not iterate over all streams.
        self.num_waiting = 0  # prompts that are not admitted yet
        self.waiting_tokens = 0  # their tokens
        self.backlog_tokens = 0  # their tokens, and those of their longest possible answers
        self.num_running = 0  # answers of admitted prompts
        self._tasks: list[asyncio.Task] = []
        self._fault: CheckError | None = None
        self.ended = asyncio.Event()  # set after an internal error: the service is over
        self.tokens_per_s = 0.0  # tokens of prompts and answers, a moving average
        self._measured_at = time.monotonic()
        self._num_measured = 0  # tokens since then

    def _chat(self, template: ChatTemplate | None) -> Chat:
        """Return the chat of a template; models of equal ones share its process."""
        for chat in self.chats:
            if chat.template == template:
                return chat
        self.chats.append(Chat(template))
        return self.chats[-1]

    async def start(self) -> None:
        """Start the engine, and return when it is ready. Raises LockstepError."""
        opening = asyncio.create_task(self.supervisor.open_engine())
        try:
            await asyncio.gather(*(chat.start() for chat in self.chats))
            # Reads the vocabulary, or the first request would wait for it.
            await asyncio.to_thread(self.default.tokenizer.min_tokens, 0)
            await opening
        except BaseException:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            raise
        for name, coroutine in (("supervise", self.supervisor.run()), ("watch", self.supervisor.watch())):
            task = asyncio.create_task(coroutine, name=name)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task) -> None:
        """End the service: without this task, requests would wait for ever."""
        if task.cancelled():
            return
        error = task.exception()
        fault = fault_of(error) if error is not None else "it returned"
        self._fault = CheckError(f"server: expected its task {task.get_name()} to run, found {fault}")
        self.ended.set()
        self.fail_all(StreamError("the server failed; its log says why"))

    def check(self) -> None:
        """Raise CheckError where an internal error has ended the service."""
        if self._fault is not None:
            raise self._fault

    @property
    def ready(self) -> Ready:
        """Return the engine's identity and limits. The service must have been started."""
        assert self.first_frame is not None
        return self.first_frame

    async def stop(self) -> None:
        """End the engine, and all requests that have not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail_all(StreamError("the server is shutting down", 503, "shutting_down"))
        for chat in self.chats:
            await chat.stop()
        if self.link is not None:
            await self.link.stop()

    def describe(self) -> None:
        """Log what runs and waits, here and in the engine process."""
        if self.link is not None:
            os.kill(self.link.pid, signal.SIGUSR1)
        log.info(
            f"service: {len(self.streams)} streams, {self.num_running} answers running, {self.num_waiting} prompts "
            f"of {self.waiting_tokens} tokens waiting, {self.restarts} restarts"
        )

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait up to `seconds` for the running ones."""
        self.draining = True
        end = time.monotonic() + seconds
        while self.streams and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def prompts_with_adapter(self) -> list[PromptRequest]:
        prompts = itertools.chain.from_iterable(stream.prompts for stream in self.streams)
        return [prompt for prompt in prompts if prompt.request.adapter]

    def _is_used(self, adapter: str) -> bool:
        return any(prompt.request.adapter == adapter for prompt in self.prompts_with_adapter())

    @property
    def is_ready(self) -> bool:
        """Return whether requests are taken."""
        return self.link is not None and not self.draining and self._fault is None

    @property
    def heartbeat_age(self) -> float | None:
        """Return the seconds since the engine's last frame; None without an engine."""
        if self.link is None:
            return None
        return time.monotonic() - self.link.last_frame

    @property
    def is_live(self) -> bool:
        """Return whether the service runs, and its engine is responsive or being started."""
        age = self.heartbeat_age
        return self._fault is None and (age is None or age < self.limits.stall)

    def total(self, name: str) -> int:
        """Return a total over all engine processes: prefix_queries and prefix_hits in tokens, swaps in requests."""
        return getattr(self._earlier, name) + getattr(self.counters, name)

    def drafts(self) -> list[int]:
        """Return `Speculation.counts`, summed over all engine processes; [] without speculation."""
        pairs = itertools.zip_longest(self._earlier.drafts, self.counters.drafts, fillvalue=0)
        return [sum(pair) for pair in pairs]

    @property
    def engine_pid(self) -> int | None:
        return None if self.link is None else self.link.pid

    @property
    def default(self) -> ServedModel:
        """Return the model of requests that name none."""
        return self.models[self.name]

    @property
    def model_names(self) -> list[str]:
        """Return the names that the current request may give: of the models that its key opens, and their adapters."""
        names = list[str]()
        for model in self.opened_models:
            names += model.adapters.model_names
        return names

    @property
    def opened_models(self) -> list[ServedModel]:
        """Return the models that the current request's key opens."""
        opened = OPENED_MODELS.get() or self.models
        return [model for name, model in self.models.items() if name in opened]

    def model(self, name: str | None) -> ServedModel:
        """Return the model that a request names, itself or with an adapter; the first one that its key opens for None.

        Raises BadRequest, 404, for one that is not there or that the key does not open: as OpenAI, it does not tell.
        """
        models = self.opened_models
        if name is None:
            return models[0]
        for model in models:
            if name in model.adapters.model_names:
                return model
        raise BadRequest(f"model: expected {one_of(self.model_names)}, found {name[:80]!r}", "model", 404)

    def submit(self, prompts: Sequence[PromptRequest], model: ServedModel) -> Stream:
        """Queue prompts of a model, and return the stream of their answers. Raises StreamError."""
        if self.draining:
            raise StreamError("the server is shutting down; try another one", 503, "shutting_down")
        if self._fault is not None:
            raise StreamError("the server failed; its log says why", 503, "server_failed")
        if self.link is None and not self.supervisor.is_restarting:
            raise StreamError("the engine does not start; try again", 503, "engine_starting", retry_after=1)
        self.weights.check_queueing()
        self._check_room(prompts, model)  # first: under overload, a refusal must be cheap
        tenant = TENANT.get()
        for prompt in prompts:
            request = prompt.request
            if tenant:  # prefixes are never shared across tenants
                request = replace(request, cache_salt=f"{tenant}/{request.cache_salt}")
            if model.checkpoint:
                adapter = request.adapter and model.adapters.in_engine(request.adapter)
                request = replace(request, checkpoint=model.checkpoint, adapter=adapter)
            prompt.request = request
        stream = Stream(prompts, model.tokenizer, model.metrics, self.cancel)
        self.streams.add(stream)
        for prompt in prompts:
            self._count_waiting(prompt, 1)
            if self.link is not None:  # else `Supervisor.resubmit` sends it to the next engine
                prompt.number = self.send(prompt, prompt.request)
        return stream

    def send(self, prompt: PromptRequest, request: Request) -> int:
        """Send a request for answers to a prompt to the engine, and return its number there."""
        assert self.link is not None
        number = next(self._numbers)
        self.prompts[number] = prompt
        self.link.send(Add(number, request))
        return number

    def cancel(self, stream: Stream) -> None:
        """Abort the unfinished answers of a stream; their slots are free in the next step."""
        for prompt in stream.prompts:
            if prompt.choices:
                self._abort(prompt)
                for choice in sorted(prompt.choices):
                    self._finish(prompt, choice, "abort")
                    stream.push(prompt.first + choice, "", None, None, "abort")
        self.forget(stream)

    def _check_room(self, prompts: Sequence[PromptRequest], model: ServedModel) -> None:
        limits = self.limits
        num_slots = self.ready.max_batch_size
        capacity = limits.max_queue + num_slots
        if len(prompts) > capacity:  # not 429: trying again would not help
            room = f"({limits.max_queue} that wait and {num_slots} that run)"
            message = f"prompt: expected at most {capacity} prompts {room}, found {len(prompts)}; send fewer"
            raise StreamError(message, 400, "request_too_large", param="prompt")
        tokens = self.waiting_tokens + sum(len(prompt.request.prompt_ids) for prompt in prompts)
        free_slots = max(0, num_slots - self.num_running)  # prompts that fit there do not wait
        is_full = self.num_waiting + len(prompts) > limits.max_queue + free_slots
        if is_full or (self.num_waiting and tokens > limits.max_queue_tokens):
            retry_after = 1
            if self.tokens_per_s:
                retry_after = max(1, round(self.backlog_tokens / self.tokens_per_s))
            retry_after = min(retry_after, _MAX_RETRY_AFTER_S)
            model.metrics.refused.inc()
            queue = f"{self.num_waiting} requests of {self.waiting_tokens} prompt tokens wait"
            limit = f"(at most {limits.max_queue} and {limits.max_queue_tokens})"
            message = f"the queue is full: {queue} {limit}; try again in {retry_after} s"
            raise StreamError(message, 429, "queue_full", retry_after)

    def _count_waiting(self, prompt: PromptRequest, sign: int) -> None:
        """Add a prompt to the totals of those that wait, or remove it; sign: 1 or -1."""
        request = prompt.request
        tokens = len(request.prompt_ids)
        self.num_waiting += sign
        self.waiting_tokens += sign * tokens
        self.backlog_tokens += sign * (tokens + request.n * request.max_new_tokens)

    def engine_died(self) -> None:
        """Go on without an engine: keep its totals, and fail what waits for it alone."""
        self.link = None
        for model in self.models.values():
            model.adapters.engine_died()
        self.weights.engine_died()
        self._earlier = Counters(
            swaps=self.total("swaps"),
            prefix_queries=self.total("prefix_queries"),
            prefix_hits=self.total("prefix_hits"),
            drafts=self.drafts(),
        )
        self.counters = Counters()

    def handle_frame(self, frame: Frame) -> None:
        if isinstance(frame, Step):
            self._handle_step(frame)
        elif isinstance(frame, Refused):
            self._handle_refusal(frame)
        elif isinstance(frame, Loaded):
            for model in self.models.values():
                model.adapters.engine_answered(frame)
        elif isinstance(frame, WeightsUpdated):
            self.weights.engine_answered(frame)

    def _handle_refusal(self, frame: Refused) -> None:
        prompt = self.prompts.get(frame.id)
        if prompt is None:
            return
        if frame.is_fault:
            self.fail(prompt.stream, StreamError(f"the model cannot be loaded: {frame.message}", 503, "model_lost"))
            return
        code = "invalid_grammar" if frame.param else "request_too_large"
        self.fail(prompt.stream, StreamError(frame.message, 400, code, param=frame.param))

    def _handle_step(self, frame: Step) -> None:
        self.counters = frame.counters
        now = time.monotonic()
        for number, num_cached_tokens in frame.admitted:
            prompt = self.prompts.get(number)
            if prompt is not None and prompt.admitted is None:
                self._admit(prompt, num_cached_tokens, now)
        for number, first, logprobs in frame.prompt_logprobs:
            prompt = self.prompts.get(number)
            # Once only: several resumed choices of a prompt each send them.
            if prompt is not None and first == len(prompt.prompt_logprobs) + 1:
                prompt.prompt_logprobs += logprobs
        num_tokens = 0
        metrics = self.default.metrics
        for number, choice, token, finish, token_logprobs in frame.tokens:
            prompt = self.prompts.get(number)
            if prompt is None:
                continue
            metrics = prompt.stream.metrics  # a step is of one model
            try:
                num_tokens += self._add_token(prompt, choice, token, finish, token_logprobs, now)
            except Exception as error:  # fails this answer only
                log.error(f"a token cannot be handled: {fault_of(error)}")
                self.fail(prompt.stream, StreamError("the server failed; its log says why"))
        if num_tokens:
            self._num_measured += num_tokens
            metrics.generation_tokens.inc(num_tokens)

    def _admit(self, prompt: PromptRequest, num_cached_tokens: int, now: float) -> None:
        self._count_waiting(prompt, -1)
        self.num_running += len(prompt.choices)
        prompt.admitted = now
        prompt.num_cached_tokens = num_cached_tokens
        num_tokens = len(prompt.request.prompt_ids)
        prompt.stream.metrics.queue_time.observe(now - prompt.arrived)
        prompt.stream.metrics.prompt_tokens.inc(num_tokens)
        self._num_measured += num_tokens
        prompt.stream.wake()

    def _add_token(
        self, prompt: PromptRequest, number: int, token: int, finish: str | None, logprobs: Logprobs | None, now: float
    ) -> bool:
        """Add a token to its answer; -1 ends the answer without one. Returns whether a token was added."""
        choice = number - prompt.request.choice
        if choice not in prompt.choices:
            return False
        stream = prompt.stream
        text = prompt.collector.add(choice, token, finish, logprobs)
        is_token = token >= 0
        if is_token:
            prompt.stream.metrics.token(now, prompt)
            prompt.last_token = now
            if stream.first_token is None:
                stream.first_token = now
        reason = prompt.collector.completion.choices[choice].finish
        if reason in _ERRORS:
            self._fail_at_token(prompt, reason)
            return is_token
        stream.push(prompt.first + choice, text, token if is_token else None, logprobs, reason)
        if not reason:
            return is_token
        if reason == "stop_string" and not finish and self.link is not None:
            # A resumed choice has a separate number in the engine.
            self.link.send(Abort(prompt.resumed.get(choice, prompt.number), number))
        self._finish(prompt, choice, reason)
        if stream.done:
            self.forget(stream)
        return is_token

    def _fail_at_token(self, prompt: PromptRequest, reason: str) -> None:
        """Fail a stream for an error that the engine reported with a token."""
        if reason == "error":
            error = StreamError(f"{NOT_FINITE}; the request was ended")
        else:
            assert prompt.request.grammar is not None
            param = prompt.request.grammar.name
            message = f"{param}: during the answer, the grammar became too complex; simplify it"
            # 400: the same grammar would fail again, so clients should not retry.
            error = StreamError(message, 400, reason, param=param)
        self.fail(prompt.stream, error)

    def _finish(self, prompt: PromptRequest, choice: int, reason: str | None) -> None:
        """End a choice; reason: None if it does not count as an answer in the metrics."""
        prompt.choices.remove(choice)
        self.num_running -= prompt.admitted is not None
        if reason is not None:
            prompt.stream.metrics.finished(reason)
        self.prompts.pop(prompt.resumed.pop(choice, -1), None)
        if not prompt.choices:
            self.prompts.pop(prompt.number, None)

    def _abort(self, prompt: PromptRequest) -> None:
        for number in list(prompt.resumed.values()) or [prompt.number]:
            self.prompts.pop(number, None)
            if prompt.choices and self.link is not None:
                self.link.send(Abort(number))

    def forget(self, stream: Stream) -> None:
        """Remove a stream that has ended; later calls do nothing."""
        if stream not in self.streams:
            return
        self.streams.remove(stream)
        for prompt in stream.prompts:
            if prompt.admitted is None:
                self._count_waiting(prompt, -1)
        if not _is_refused(stream):
            stream.metrics.latency.observe(time.monotonic() - stream.began)

    def fail(self, stream: Stream, error: StreamError) -> None:
        stream.fail(error)
        reason = None if _is_refused(stream) else "error"
        for prompt in stream.prompts:
            self._abort(prompt)
            for choice in list(prompt.choices):
                self._finish(prompt, choice, reason)
        self.forget(stream)

    def fail_all(self, error: StreamError) -> None:
        for stream in list(self.streams):
            self.fail(stream, error)

    def measure(self, now: float) -> None:
        """Update the throughput, of which a full queue's Retry-After is made."""
        elapsed = now - self._measured_at
        if self._num_measured and elapsed > 0.5:
            rate = self._num_measured / elapsed
            if self.tokens_per_s:
                rate = 0.7 * self.tokens_per_s + 0.3 * rate
            self.tokens_per_s = rate
        self._measured_at = now
        self._num_measured = 0


def _is_refused(stream: Stream) -> bool:
    """Return whether the client's request was at fault; such streams are not in the metrics."""
    return stream.error is not None and stream.error.status == 400
