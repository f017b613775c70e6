"""The process of `lockstep serve --unix`, started if no server listens. The model that started it ends it."""

import contextlib
import shlex
import subprocess
import time

import lockstep_http as http
import triton_python_backend_utils as pb_utils
from lockstep_watchdog import Every


class Process:
    """The process of a server, and Triton's metrics of it. parameters: of config.pbtxt."""

    def __init__(self, parameters, watchdog):
        self._path = parameters["lockstep_socket"]
        self._command = shlex.split(parameters["lockstep_command"])
        self._seconds = float(parameters["lockstep_start_seconds"])
        self._watchdog = watchdog
        self.process = None
        self._is_closed = False
        self._ensure()
        # A reference, as metrics stop working once their family is deleted.
        self._family = pb_utils.MetricFamily("lockstep_requests", "Requests, by state.", pb_utils.MetricFamily.GAUGE)
        self._gauges = {state: self._family.Metric(labels={"state": state}) for state in ("running", "waiting")}
        # The only thread that touches metrics: several kill Triton's stub process.
        self._reporter = Every(float(parameters.get("stats_check_period_ms", 1000)) / 1000, self._report)

    def close(self):
        """End the server, where it was started here."""
        self._is_closed = True
        self._reporter.close()
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def _ensure(self):
        """Start the server where none answers, and wait until it is ready. Raises ServerError."""
        with contextlib.suppress(Exception):
            return self._ask("/health/ready")
        # A new session, so that Ctrl-C reaches Triton alone, which lets requests finish first. The server logs to
        # Triton's stderr. Its stdin closes with this process, even if that is killed, and then the server ends.
        command = [*self._command, "--until-stdin-ends"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        end = time.monotonic() + self._seconds
        while True:
            try:
                return self._ask("/health/ready")
            except Exception as error:
                if self._is_closed or self.process.poll() is not None or time.monotonic() > end:
                    message = f"the server at {self._path} did not become ready: {error}"
                    raise http.ServerError(503, message) from None
                time.sleep(0.1)

    def _report(self):
        with contextlib.suppress(Exception):  # of any kind: nothing else starts the server again
            if self.process is not None and self.process.poll() is not None:
                self._ensure()
            status = self._ask("/status")
            self._watchdog.check()
            for state, gauge in self._gauges.items():
                gauge.set(status[state])

    def _ask(self, url):
        with contextlib.closing(http.Connection(self._path, 10)) as connection:
            return connection.ask("GET", url)
