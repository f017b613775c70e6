"""Threads that poll, for instance whether Triton was killed. Standard library only."""

import faulthandler
import os
import threading

_PERIOD_SECONDS = 0.5
_STUCK_SECONDS = 60


class Every:
    """A thread that calls `poll` every `seconds`, until it is closed."""

    def __init__(self, seconds, poll):
        self._seconds = seconds
        self._poll = poll
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while not self._ended.wait(self._seconds):
            self._poll()


class Watchdog:
    """Ends a model's process when Triton, its parent, was killed.

    A call that waits for a killed Triton (to take a response, to set a metric) holds the GIL and never returns: no
    Python thread runs, and Triton's stub process cannot end. faulthandler's timer needs no GIL: it ends a process that
    has not reset it in time.
    """

    def __init__(self):
        self._parent = os.getppid()
        self.check()  # a call before the thread's first turn may never return
        self._thread = Every(_PERIOD_SECONDS, self.check)

    def check(self):
        if os.getppid() != self._parent:
            os._exit(1)
        faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)

    def close(self):
        self._thread.close()
        faulthandler.cancel_dump_traceback_later()
