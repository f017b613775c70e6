"""The API process's end of an engine process: its start, requests and frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import msgspec

from lockstep.errors import CheckError
from lockstep.processes import environment
from lockstep.runtime.request import Request
from lockstep_serve.engine_process import error_of
from lockstep_serve.frames import Frame, Ready, packed, packed_add, split
from lockstep_serve.settings import EngineOptions

_decode = msgspec.json.Decoder().decode


class EngineLink(asyncio.Protocol):
    """One engine process. Its frames go straight to the handler of `run`: another task would cost each step time."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._transport: asyncio.WriteTransport
        self.last_frame = time.monotonic()
        self._early: asyncio.Queue[Frame | None] = asyncio.Queue()  # before `run`; None: the process ended
        self._ended: asyncio.Future[Frame | None] = asyncio.get_running_loop().create_future()
        self._handle: Callable[[Frame], None] = self._early.put_nowait
        self._in = bytearray()

    @classmethod
    async def start(cls, options: EngineOptions, seconds: float) -> tuple[EngineLink, Ready]:
        """Start a ready engine within `seconds`. Raises what opening it raises."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no free descriptor
            raise CheckError(f"engine process: expected a socket for it, found none: {error.strerror}") from None
        command = [sys.executable, "-m", "lockstep_serve.engine_process", str(theirs.fileno())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=2, env=environment()
            )
        except OSError as error:
            ours.close()
            raise CheckError(
                f"engine process: expected it to start, found that it does not: {error.strerror}"
            ) from None
        finally:
            theirs.close()
        link = cls(process)
        link._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        try:
            link._transport.write(packed({"type": "open", "options": asdict(options)}))
            frame = await asyncio.wait_for(link._early.get(), seconds)
        except asyncio.TimeoutError:
            await link.stop()
            raise CheckError(
                f"engine process: expected it ready within {seconds:.0f} s, found that it was not"
            ) from None
        except BaseException:
            await link.stop()
            raise
        if frame is None:
            code = await link.stop()
            raise CheckError(f"engine process: expected it to open the engines, found that it ended with code {code}")
        if frame["type"] == "failed":
            await link.stop()
            raise error_of(frame)
        return link, Ready(**frame["ready"])

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
            frame: Frame = _decode(data)
            if frame["type"] == "failed":
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

    def add(self, number: int, request: Request) -> None:
        """Send a request. If the engine has died, the service resubmits it to the next one."""
        self._transport.write(packed_add(number, request))

    def load(self, number: int, name: str, folder: str) -> None:
        """Load an adapter; the frame "loaded" or "not_loaded" has this number."""
        self._transport.write(packed({"type": "load", "id": number, "name": name, "folder": folder}))

    def unload(self, name: str) -> None:
        """Unload an adapter, which no request may use."""
        self._transport.write(packed({"type": "unload", "id": -1, "name": name}))

    def abort(self, number: int, choice: int | None = None) -> None:
        """Abort a request, or one choice of it."""
        self._transport.write(packed({"type": "abort", "id": number, "choice": choice}))

    async def run(self, handle: Callable[[Frame], None]) -> Frame | None:
        """Call `handle` with all frames until the process ends; return its last one if "failed", else None."""
        while not self._early.empty():
            frame = self._early.get_nowait()
            if frame is not None and frame["type"] != "failed":
                handle(frame)
        self._handle = handle
        return await self._ended

    def kill(self) -> None:
        """End the process at once; `run` then ends."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> int:
        """End the process by closing its socket, then by a signal. Returns its exit code."""
        self._transport.close()
        try:
            return await asyncio.wait_for(self._process.wait(), 2)
        except asyncio.TimeoutError:
            self.kill()
            return await self._process.wait()
