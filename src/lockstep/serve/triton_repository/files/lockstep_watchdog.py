"""Threads that look at something from time to time, as at whether Triton was killed. The standard library."""

import faulthandler
import os
import threading

_PERIOD_SECONDS = 0.5
_STUCK_SECONDS = 60


class Every:
    """A thread that calls `look` every `seconds`, until it is closed."""

    def __init__(self, seconds, look):
        self._seconds = seconds
        self._look = look
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while not self._ended.wait(self._seconds):
            self._look()


class Watchdog:
    """The end of a model's process where Triton, its parent, was killed.

    A call that then waits for Triton (to take a response, to set a metric) keeps the interpreter's lock and never
    returns: no thread of Python runs, and Triton's own stub cannot end either. faulthandler's timer needs no lock: it
    ends a process where it was not set again for so long.
    """

    def __init__(self):
        self._parent = os.getppid()
        self.check()  # a call that comes before the thread's first turn may be one that never returns
        self._thread = Every(_PERIOD_SECONDS, self.check)

    def check(self):
        if os.getppid() != self._parent:
            os._exit(1)
        faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)

    def close(self):
        self._thread.close()
        faulthandler.cancel_dump_traceback_later()
