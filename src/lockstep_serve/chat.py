"""Chats as prompts: a separate process renders the chat template (`template_process.py` says why)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.processes import environment
from lockstep_serve.log import log
from lockstep_serve.stream import StreamError
from lockstep_serve.template_process import CPU_SECONDS, HEADER

RENDER_TIMEOUT_S = 60.0  # until a process counts as hung; its limit of CPU time ends one that computes sooner
_QUEUE_TIMEOUT_S = 30.0  # that a chat may wait for those before it


class ChatError(Exception):
    """The error of messages that make no prompt: one line."""


class _Lost(Exception):
    """The template process gave no answer, and no limit was the cause: one line."""


class Chat:
    """The chat template of a model. fault: why no chat is possible; None where it is."""

    def __init__(self, template: ChatTemplate | None):
        self._template = template
        self.fault: str | None = None if template else "the model has no chat template"
        self.process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # one chat at a time has the process
        self._rendering: asyncio.Task[str] | None = None  # the last one

    @property
    def template(self) -> ChatTemplate | None:
        """Return the template; None where no chat is possible."""
        return None if self.fault is not None else self._template

    async def start(self) -> None:
        """Load the template. Where that fails, the server only refuses chats: completions need no template."""
        if self._template is None:
            return
        try:
            async with self._turn:
                await self._started()
        except (ChatError, _Lost) as error:
            self.fault = f"the model's chat template cannot be used: {error}"
            log.warning(f"no chat: {self.fault}; correct it and export again")

    async def stop(self) -> None:
        """End the process, and the chat that it renders."""
        if self._rendering is not None:
            self._rendering.cancel()
            await asyncio.gather(self._rendering, return_exceptions=True)
        await self._end(5.0)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a chat.

        Args:
            messages: with role and content, and whatever else the template knows; values as JSON has them.
            add_generation_prompt: end with what opens an answer.
            continues: leave the last message open instead; its content must be text.
            variables: further ones for the template.

        Raises:
            ChatError: where there is no template, it refuses the messages, or it takes too much.
            StreamError: where too many chats wait, and where the process hangs or dies twice.
        """
        if self.fault is not None:
            raise ChatError(self.fault)
        frame = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "continues": continues,
            "variables": dict(variables or {}),
        }
        began = time.monotonic()
        await self._turn.acquire()
        if time.monotonic() - began > _QUEUE_TIMEOUT_S:
            self._turn.release()
            raise StreamError("too many chats wait for the chat template; try again", 503, "queue_timeout", 1)
        # A separate task: it reads the answer even when the client is gone, or the next chat would get it.
        self._rendering = asyncio.create_task(self._render(frame))
        self._rendering.add_done_callback(self._has_rendered)
        return await asyncio.shield(self._rendering)

    def _has_rendered(self, task: asyncio.Task[str]) -> None:
        self._turn.release()
        if not task.cancelled():
            task.exception()  # read, or asyncio logs it where no request waits for the task

    async def _render(self, frame: Mapping[str, Any]) -> str:
        try:
            try:
                return await self._ask(await self._started(), frame)
            except _Lost:  # it may have died long ago: try a new one
                return await self._ask(await self._started(), frame)
        except _Lost as error:
            raise StreamError(f"the process of the chat template: {error}; try again", 500, "template_error") from None

    async def _started(self) -> asyncio.subprocess.Process:
        if self.process is None:
            assert self._template is not None
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "lockstep_serve.template_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=environment(),
                )
            except OSError as error:  # no free descriptor
                raise _Lost(f"it does not start: {error.strerror}") from None
            first_frame = {"template": self._template.template, "special_tokens": dict(self._template.special_tokens)}
            try:
                await self._ask(self.process, first_frame)
            except (ChatError, _Lost):
                await self._end(0.0)
                raise
        return self.process

    async def _ask(self, process: asyncio.subprocess.Process, frame: Mapping[str, Any]) -> str:
        data = json.dumps(frame).encode()
        try:
            answer = await asyncio.wait_for(_exchange(process, data), RENDER_TIMEOUT_S)
        except asyncio.TimeoutError:
            await self._end(0.0)
            reason = f"the process of the chat template: no answer within {RENDER_TIMEOUT_S:g} s; try again"
            raise StreamError(reason, 500, "template_error") from None
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # uvloop raises the last for a closed pipe
            code = await self._end(5.0)
            if code == -signal.SIGPROF:
                raise ChatError(f"more than {CPU_SECONDS:g} s of processor time") from None
            raise _Lost(f"it ended with code {code}") from None
        except BaseException:  # the client is gone, and the next chat must not get its answer
            await self._end(0.0)
            raise
        if "error" in answer:
            raise ChatError(answer["error"])
        return answer["text"]

    async def _end(self, seconds: float) -> int | None:
        """End the process, within `seconds` or at once. Returns its exit code."""
        process = self.process
        self.process = None
        if process is None:
            return None
        assert process.stdin is not None
        process.stdin.close()
        if seconds:
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(process.wait(), seconds)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


async def _exchange(process: asyncio.subprocess.Process, data: bytes) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(HEADER.pack(len(data)) + data)
    await process.stdin.drain()
    (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return json.loads(await process.stdout.readexactly(size))
