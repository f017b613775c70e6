"""The engine process of a service, started, watched and replaced: if it dies, its requests go on in the next one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.errors import InputError, LockstepError
from lockstep_serve.link import EngineLink
from lockstep_serve.log import fault_of, log
from lockstep_serve.spawn import EngineProcess
from lockstep_serve.stream import PromptRequest, StreamError

if TYPE_CHECKING:
    from lockstep_serve.service import Service

_CRASH_WINDOW_S = 60.0  # in which a second crash of the engine fails all requests
_FIRST_BACKOFF_S = 0.5  # between two attempts to start an engine; doubled after each
_MAX_BACKOFF_S = 30.0


class Supervisor:
    """Starts the engine processes of a service.

    Attributes:
        is_restarting: An engine is being started after a crash, and no attempt has failed yet.
        crashes: The times of the last ones.
    """

    def __init__(self, service: Service, process: EngineProcess | None):
        """process: one that was started already, for the first engine."""
        self._service = service
        self._first_process = process
        self._identity = ""  # of what the first engine was started with
        self.is_restarting = False
        self.crashes: deque[float] = deque()

    async def open_engine(self) -> None:
        """Start an engine, and return when it is ready. Raises LockstepError, and OSError."""
        service = self._service
        adapters = [model.adapters for model in service.models.values()]
        loaded = list(itertools.chain.from_iterable(entry.to_load() for entry in adapters))
        options = replace(service.engine_options, loaded=loaded)
        if service.first_frame is not None:  # a model whose files were damaged meanwhile must not stop the others
            started = service.first_frame.others
            checkpoints = [replace(files, weights_sha256=started[files.name][2]) for files in options.others]
            options = replace(options, others=checkpoints, restarted=True)
        process = self._first_process
        self._first_process = None
        link, ready = await EngineLink.start(options, service.limits.start, process)
        if ready.identity != (self._identity or ready.identity):
            await link.stop()
            raise InputError(
                f"{options.weights}: expected engines and weights of when the server started, found others; put them "
                "back, or start the server again"
            )
        self._identity = ready.identity
        service.first_frame = ready
        for entry in adapters:
            for line in entry.engine_started(link, service.first_frame):
                log.warning(line)
        service.link = link
        service.weights.engine_started()

    async def run(self) -> None:
        """Handle the engine's frames; whenever it dies, start another one and resubmit the requests."""
        service = self._service
        while True:
            assert service.link is not None
            link = service.link
            reason = None
            try:
                last_frame = await link.run(service.handle_frame)
                if last_frame:
                    reason = last_frame.message
            except Exception as error:  # a frame that cannot be handled: a new engine process may send none
                reason = f"one of its frames cannot be handled: {fault_of(error)}"
            self.is_restarting = True
            service.engine_died()
            code = await link.stop()
            log.error(f"engine process {link.pid} died: {reason or f'it ended with code {code}'}; starting another")
            self.record_crash()
            backoff = _FIRST_BACKOFF_S
            while service.link is None:
                try:
                    await self.open_engine()
                except (LockstepError, OSError) as error:
                    self.is_restarting = False
                    log.error(f"the engine does not start: {error}")
                    service.fail_all(StreamError("the engine died and does not start again"))
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, _MAX_BACKOFF_S)
            service.restarts += 1
            self.resubmit()

    def record_crash(self) -> None:
        """Fail requests that ran in two crashes, which they may cause; at a second in `_CRASH_WINDOW_S`, fail all."""
        service = self._service
        now = time.monotonic()
        while self.crashes and now - self.crashes[0] > _CRASH_WINDOW_S:
            self.crashes.popleft()
        self.crashes.append(now)
        for stream in list(service.streams):
            for prompt in stream.prompts:
                prompt.num_crashes += bool(prompt.choices)
            if any(prompt.num_crashes > 1 for prompt in stream.prompts):
                service.fail(stream, StreamError("the engine died twice while it ran this request"))
            elif len(self.crashes) > 1:
                service.fail(stream, StreamError("the engine died twice within a minute"))

    def resubmit(self) -> None:
        """Resubmit all unfinished requests to the new engine: each choice continues after its last token."""
        self._service.prompts.clear()
        for stream in self._service.streams:
            for prompt in stream.prompts:
                self._resubmit(prompt)

    def _resubmit(self, prompt: PromptRequest) -> None:
        service = self._service
        prompt.resumed.clear()
        request = prompt.request
        choices = prompt.collector.completion.choices
        if len(prompt.prompt_logprobs) < len(request.prompt_ids) - 1:  # incomplete: the new engine sends all
            prompt.prompt_logprobs.clear()
        elif request.max_new_tokens:
            request = replace(request, prompt_logprobs=None)
        if len(prompt.choices) == request.n and not any(choice.token_ids for choice in choices):  # not begun
            prompt.number = service.send(prompt, request)
            return
        # Choices have different numbers of tokens by now, so each becomes a separate request.
        for choice in sorted(prompt.choices):
            answer_ids = choices[choice].token_ids
            resumed = replace(request, n=1, choice=request.choice + choice, answer_ids=answer_ids)
            prompt.resumed[choice] = service.send(prompt, resumed)

    async def watch(self) -> None:
        """About once a second, end requests that waited too long, unread streams, and an engine that hangs."""
        service = self._service
        limits = service.limits
        while True:
            await asyncio.sleep(min(1.0, limits.queue_timeout / 2, limits.stall / 2))
            now = time.monotonic()
            service.measure(now)
            for stream in list(service.streams):
                if not stream.is_admitted and now - stream.began > limits.queue_timeout:
                    message = f"the request waited for {now - stream.began:.0f} s (at most {limits.queue_timeout:g})"
                    service.fail(stream, StreamError(message, 503, "queue_timeout", 1))
                elif stream.sending_since is not None and now - stream.sending_since > limits.slow_reader:
                    stream.cancel()
            link = service.link
            if link is not None and now - link.last_frame > limits.stall:
                log.error(f"engine process {link.pid} gave no sign of life for {limits.stall:g} s")
                link.kill()  # `run` then starts another
