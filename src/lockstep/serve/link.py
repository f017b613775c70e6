"""The API process's end: starts an engine process, sends it requests, and gives its frames to whoever listens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import CheckError, InputError
from lockstep.runtime.request import Request
from lockstep.serve.engine_process import error_of
from lockstep.serve.frames import HEADER, Frame, packed, packed_add

_SOURCES = Path(__file__).resolve().parents[2]
_decode = msgspec.json.Decoder().decode


class EngineLink:
    """One engine process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer
        self.last_frame = time.monotonic()

    @classmethod
    async def start(cls, python: str | None, asked: Mapping[str, Any], seconds: float) -> tuple[EngineLink, Frame]:
        """Start an engine process in the interpreter `python` (None: this one); `asked`: what it opens. Gives it, ready
        and warm, and its frame "ready". Raises what opening raises, and CheckError for one that ends before, or is not
        ready in time."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [python or sys.executable, "-m", "lockstep.serve.engine_process", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": str(_SOURCES), "PYTHONUTF8": "1"}
        try:
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=2, env=environment
            )
        except OSError as error:
            ours.close()
            raise InputError(f"expected a Python interpreter, found {python!r}: {error.strerror}") from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        link = cls(process, reader, writer)
        try:
            link._writer.write(packed({"type": "open", **asked}))
            frame = await asyncio.wait_for(link._next(), seconds)
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
        return link, frame

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, number: int, request: Request) -> None:
        """Send a request; one to a process that is gone is lost, and brought to the next one."""
        self._writer.write(packed_add(number, request))

    def load(self, number: int, name: str, folder: str) -> None:
        """Have an adapter read, checked and taken; "loaded" or "not_loaded" comes back under this number."""
        self._writer.write(packed({"type": "load", "id": number, "name": name, "folder": folder}))

    def unload(self, name: str) -> None:
        """Have an adapter forgotten, which no request that was sent is computed with."""
        self._writer.write(packed({"type": "unload", "id": -1, "name": name}))

    def abort(self, number: int, choice: int | None = None) -> None:
        """End a request, or one choice of it."""
        self._writer.write(packed({"type": "abort", "id": number, **({} if choice is None else {"choice": choice})}))

    async def run(self, take: Callable[[Frame], None]) -> Frame | None:
        """Give all frames to `take`, until the process ends; its last words ("failed"), if it had any."""
        while (frame := await self._next()) is not None:
            self.last_frame = time.monotonic()
            if frame["type"] == "failed":
                return frame
            take(frame)
        return None

    async def _next(self) -> Frame | None:
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return _decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def kill(self) -> None:
        """End the process at once; `run` then ends."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> int:
        """End the process, kindly if it hears; gives its exit code."""
        self._writer.close()
        try:
            return await asyncio.wait_for(self._process.wait(), 2)
        except asyncio.TimeoutError:
            self.kill()
            return await self._process.wait()
