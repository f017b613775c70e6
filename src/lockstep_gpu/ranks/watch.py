"""A watchdog for ranks whose device hangs, for which the host would wait forever.

A kernel that waits too long for another rank gives up and records that rank in page-locked memory (sums.cuh). If the
host is waiting for a healthy rank, it reads the record and ends the step. If it is waiting for the rank that hangs, the
library call never returns: then this thread names the rank and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from lockstep.errors import PREFIX, CheckError
from lockstep_gpu.ranks.all_reduce import Exchange

GRACE_S = 5.0  # seconds that the host has to notice the record itself
POLL_S = 0.5


class RankWatch:
    """A watchdog of the ranks' exchanges. Its thread ends when the object is garbage."""

    def __init__(self, exchanges: Sequence[Exchange]):
        self._exchanges = exchanges
        self._waits = 0
        threading.Thread(target=_run, args=(weakref.ref(self),), name="ranks", daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch the ranks in the `with` block: the host waits for devices there."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1

    def timeout_error(self) -> str | None:
        """Return the error of a rank that another one gave up on; None if there is none or the host isn't waiting."""
        if not self._waits:
            return None
        try:
            for exchange in self._exchanges:
                exchange.check()
        except CheckError as error:
            return str(error)
        return None


def _run(reference: weakref.ref[RankWatch]) -> None:
    # The thread refers to the watch only while it asks it, so that the watch can become garbage.
    since: float | None = None
    while (watch := reference()) is not None:
        message = watch.timeout_error()
        del watch
        if message is None:
            since = None
        elif since is None:
            since = time.monotonic()
        elif time.monotonic() - since > GRACE_S:
            print(f"{PREFIX}{message}; it still hangs, so this process ends", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(POLL_S)
