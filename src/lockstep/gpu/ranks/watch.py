"""A watchdog for ranks whose device hangs: the host would wait for it for ever.

A kernel that waits for another rank gives up and notes whom it waited for (sums.cu). Where the host waits for a
rank that goes on, it finds that note and ends the step. Where it waits for the rank that hangs, nothing comes back from
the library: this thread then says which rank it is, and ends the process.
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
from lockstep.gpu.ranks.all_reduce import Exchange

_GRACE = 5.0  # seconds from the note until the host must have come back
_TICK = 0.5


class RankWatch:
    """A watchdog of the ranks' exchanges, as long as it lives."""

    def __init__(self, exchanges: Sequence[Exchange]):
        self._exchanges = exchanges
        self._waits = 0
        threading.Thread(target=_run, args=(weakref.ref(self),), name="ranks", daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the watchdog that the host waits for devices inside."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1

    def hanging(self) -> str:
        """Return what is said of a rank that others gave up; "" for none, and while the host does not wait."""
        try:
            for exchange in self._exchanges if self._waits else ():
                exchange.check()
        except CheckError as error:
            return str(error)
        return ""


def _run(reference: weakref.ref[RankWatch]) -> None:
    since: float | None = None
    while (watch := reference()) is not None:
        said = watch.hanging()
        del watch
        if not said:
            since = None
        elif since is None:
            since = time.monotonic()
        elif time.monotonic() - since > _GRACE:
            print(f"{PREFIX}{said}; it hangs still, so this process ends", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(_TICK)
