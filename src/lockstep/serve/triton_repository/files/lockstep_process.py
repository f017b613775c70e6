"""The process of `lockstep serve --unix`, started where no server listens.

The model that started it ends it.
"""

import contextlib
import subprocess
import threading
import time

import lockstep_http as server


class Process:
    """The process of a server at a Unix socket.

    command: its arguments. seconds: that it may take until it is ready.
    """

    def __init__(self, path, command, seconds):
        self._path, self._command, self._seconds = path, command, seconds
        self._process, self._ended = None, threading.Event()

    def ensure(self):
        """Start the server where none answers, and wait until it is ready.

        Raises ServerError.
        """
        with contextlib.suppress(server.ServerError):
            return self._wait(0, lambda: False)
        # A session of its own: Ctrl-C is Triton's, which lets requests finish first. What it says goes to Triton's log.
        # The pipe's end is there as long as this process: killed, it cannot end the server, which then ends by itself.
        command = [*self._command, "--until-stdin-ends"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        self._wait(self._seconds, lambda: self._process.poll() is None and not self._ended.is_set())

    def has_died(self):
        """Return whether the server was started here, and has ended."""
        return self._process is not None and self._process.poll() is not None

    def stop(self):
        """End the server, where it was started here."""
        self._ended.set()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _wait(self, seconds, goes_on):
        end = time.monotonic() + seconds
        while True:
            try:
                with contextlib.closing(server.Connection(self._path, 10)) as connection:
                    return server.call(connection, "GET", "/health/ready")
            except Exception as error:
                if time.monotonic() > end or not goes_on():
                    message = f"the server at {self._path} did not become ready: {error}"
                    raise server.ServerError(503, message) from None
                time.sleep(0.1)
