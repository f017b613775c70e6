"""The end of a model's process where Triton was killed.

The standard library.
"""

import faulthandler
import os
import threading

_PERIOD_SECONDS, _STUCK_SECONDS = 0.5, 60


class Watchdog:
    """A poll of whether Triton, the parent process, is gone.

    A call that then waits for Triton (to take a response, to set a metric) keeps the interpreter's lock and never
    returns: no thread of Python runs, and Triton's own stub cannot end either. faulthandler's timer needs no lock: it
    ends a process where it was not set anew for so long.
    """

    def __init__(self):
        self._parent, self._ended = os.getppid(), threading.Event()
        self._set_timer()  # a call that comes before the thread's first turn may be one that never returns
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self):
        """End this process where Triton was killed."""
        if os.getppid() != self._parent:
            os._exit(1)

    def close(self):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while not self._ended.wait(_PERIOD_SECONDS):
            self.check()
            self._set_timer()
        faulthandler.cancel_dump_traceback_later()

    def _set_timer(self):
        faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)
