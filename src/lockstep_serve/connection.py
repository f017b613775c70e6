"""The engine process's end of the socket: a thread receives, and sends never block."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from lockstep_serve.frames import Frame, packed, receive

_BUFFER = 1 << 22  # bytes of the kernel that a step's frame goes to while the API process is busy


class Connection:
    """The socket. What cannot be sent at once is sent later: the engine never waits for its reader.

    inbox: what the thread has received, and what other threads have for the engine's.
    """

    def __init__(self, end: socket.socket):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._end = end
        self._file = end.makefile("rb")
        self._out = bytearray()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive(self) -> Any:
        """Return the next frame. Raises EOFError where the other end is closed."""
        return receive(self._file)

    def start(self, prepare: Callable[[Any], Any]) -> None:
        """From now on receive in a thread: `inbox` gets `prepare(frame)` of each frame, and at the end an exception."""
        threading.Thread(target=self._read, args=(prepare,), name="reader", daemon=True).start()

    def _read(self, prepare: Callable[[Any], Any]) -> None:
        try:
            while True:
                self.inbox.put(prepare(self.receive()))
        except OSError:
            self.inbox.put(EOFError())
        except BaseException as error:
            self.inbox.put(error)

    def take(self, seconds: float) -> list[Any]:
        """Return what the inbox has, after up to `seconds` for the first. Raises what the thread raised."""
        if self._out:  # a peer that reads so slowly sends nothing new
            self.drain(seconds)
            seconds = 0
        items: list[Any] = []
        with contextlib.suppress(queue.Empty):
            if seconds:
                items.append(self.inbox.get(timeout=seconds))
            while True:
                items.append(self.inbox.get_nowait())
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return items

    def send(self, frame: Frame) -> None:
        """Send a frame, as far as possible without blocking. Raises EOFError where the other end is closed."""
        self._out += packed(frame)
        self.flush()

    def flush(self) -> None:
        """Send the remaining bytes, as far as possible without blocking."""
        try:
            while self._out:
                del self._out[: self._end.send(self._out, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            raise EOFError from None

    def drain(self, seconds: float) -> None:
        """Send the remaining bytes; give up if the socket takes none for `seconds`."""
        poll = select.poll()  # `select.select` cannot watch descriptors above 1,023
        poll.register(self._end, select.POLLOUT)
        while self._out and poll.poll(seconds * 1000):
            self.flush()
