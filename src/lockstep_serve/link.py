"""The API process's end of an engine process: its start, requests and frames."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable

from lockstep.errors import CheckError, InputError
from lockstep_serve.frames import Failed, Frame, Open, Ready, packed, split, unpacked
from lockstep_serve.settings import EngineOptions
from lockstep_serve.spawn import EngineProcess

_ERRORS = {error.__name__: error for error in (InputError, CheckError)}  # that end an engine process


class EngineLink(asyncio.Protocol):
    """One engine process. Its frames go straight to the handler of `run`: a queue and a task would delay each step."""

    def __init__(self, process: subprocess.Popen):
        self._process = process
        self._transport: asyncio.WriteTransport
        self.last_frame = time.monotonic()
        self._early: asyncio.Queue[Frame | None] = asyncio.Queue()  # before `run`; None: the process ended
        self._ended: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()
        self._handle: Callable[[Frame], None] = self._early.put_nowait
        self._in = bytearray()

    @classmethod
    async def start(
        cls, options: EngineOptions, seconds: float, engine: EngineProcess | None = None
    ) -> tuple[EngineLink, Ready]:
        """Open engines in a process, or a new one, and return when they are ready.

        Raises CheckError after `seconds`, or its own error.
        """
        if engine is None:
            engine = EngineProcess()
        link = cls(engine.process)
        link._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=engine.end)
        try:
            link.send(Open(options))
            frame = await asyncio.wait_for(link._early.get(), seconds)
        except asyncio.TimeoutError:
            await link.stop()
            raise CheckError(f"engine process: expected it ready within {seconds:.0f} s, found it not ready") from None
        except BaseException:
            await link.stop()
            raise
        if frame is None:
            code = await link.stop()
            raise CheckError(f"engine process: expected it to open the engines, found it ended with code {code}")
        if isinstance(frame, Failed):
            await link.stop()
            raise _ERRORS[frame.error](frame.message)
        assert isinstance(frame, Ready)
        return link, frame

    # -- called by asyncio

    def data_received(self, data: bytes) -> None:
        self._in += data
        for frame in split(self._in):
            self._receive(frame)

    def connection_lost(self, error: Exception | None) -> None:
        self._early.put_nowait(None)
        if not self._ended.done():
            self._ended.set_result(None)

    def _receive(self, data: bytes) -> None:
        self.last_frame = time.monotonic()
        if self._ended.done():
            return
        try:
            frame = unpacked(data)
            if isinstance(frame, Failed):
                self._early.put_nowait(frame)
                self._ended.set_result(frame)
            else:
                self._handle(frame)
        except Exception as error:  # `run` raises it
            self._ended.set_exception(error)

    # -- called by the service

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: Frame) -> None:
        """Send a frame. If the engine has died, the service resubmits its requests to the next one."""
        self._transport.write(packed(frame))

    async def run(self, handle: Callable[[Frame], None]) -> Failed | None:
        """Call `handle` with all frames until the process ends; return its last frame if that is `Failed`."""
        while not self._early.empty():
            frame = self._early.get_nowait()
            if frame is not None and not isinstance(frame, Failed):
                handle(frame)
        self._handle = handle
        return await self._ended

    def kill(self) -> None:
        """End the process at once; `run` then ends."""
        self._process.kill()

    async def stop(self) -> int:
        """End the process by closing its socket, then by a signal. Returns its exit code."""
        self._transport.close()
        try:
            return await asyncio.to_thread(self._process.wait, 2)
        except subprocess.TimeoutExpired:
            self.kill()
            return await asyncio.to_thread(self._process.wait)
