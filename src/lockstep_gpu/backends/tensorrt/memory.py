"""The peak device memory of a build, sampled while it runs."""

from __future__ import annotations

import threading

from lockstep.errors import CheckError

_SECONDS = 0.02


class PeakMemory:
    """The peak device memory inside a `with`, sampled every 20 ms.

    `nbytes` after it: the largest number of bytes in use, less those in use before. Other processes on the device are
    counted too. None where CUDA failed meanwhile.
    """

    nbytes: int | None = 0

    def __enter__(self) -> PeakMemory:
        from lockstep_gpu.cuda import memory_used

        self._used = memory_used
        self._stop = threading.Event()
        self._before = self._used()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while True:
                self.nbytes = max(self.nbytes or 0, self._used() - self._before)
                if self._stop.wait(_SECONDS):
                    return
        except CheckError:  # the build fails with the same error
            self.nbytes = None
