"""Threads for what would hold up the event loop: few at a time, and a limit of how many wait.

What each takes of memory is then taken by few at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lockstep.serve.stream import StreamError

_MOST = 64  # that run or wait
_Made = TypeVar("_Made")


class Turns:
    """A number of threads that take turns."""

    def __init__(self, threads: int, name: str):
        self._threads = ThreadPoolExecutor(threads, name)
        self._count = 0

    async def run(self, make: Callable[[], _Made]) -> _Made:
        """Return what `make` makes in a thread. Raises StreamError, 429, where too many wait."""
        if self._count >= _MOST:
            raise StreamError(
                f"{self._count} long texts wait to be encoded or decoded; try again", 429, "queue_full", 1
            )
        self._count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        finally:
            self._count -= 1
