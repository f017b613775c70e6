"""NVIDIA's Triton Inference Server, the real one, in its own process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTS = 180  # seconds that a start may take on a busy machine


def free_ports(count: int) -> list[int]:
    ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [end.getsockname()[1] for end in ends]
    for end in ends:
        end.close()
    return ports


class TritonServer:
    """environment: the folder of a virtual environment from envs/triton.txt. Use as a context, which asserts that it
    ends and that nothing stays behind."""

    def __init__(self, environment: Path, repository: Path, work: Path):
        # As it was started: the name in a virtual environment is a link, and `python -m venv` links to its base.
        packages = next(environment.glob("lib/python3*/site-packages"))
        root = packages / "pytriton" / "tritonserver"
        version = packages.parent.name.removeprefix("python")
        backend = work / "backends" / "python"
        shutil.copytree(root / "backends" / "python", backend)
        # The stub that fits the interpreter, as there is one for each version; it loads that one's libpython.
        shutil.copy2(root / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
        libraries = self._libpython(environment)
        self.http, self.grpc, self.metrics = free_ports(3)
        options = {
            "model-repository": repository, "backend-directory": backend.parent, "http-address": "127.0.0.1",
            "grpc-address": "127.0.0.1", "http-port": self.http, "grpc-port": self.grpc, "metrics-port": self.metrics,
        }  # fmt: skip
        self._log = work / "triton.log"
        self.repository = repository
        self.python = environment / "bin" / "python"
        self.process = subprocess.Popen(
            [root / "bin" / "tritonserver", *(f"--{name}={value}" for name, value in options.items())],
            stdout=self._log.open("wb"), stderr=subprocess.STDOUT,
            env={
                **os.environ, "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
                "LD_LIBRARY_PATH": f"{libraries}:{packages / 'nvidia_pytriton.libs'}", "LOCKSTEP_THREADS": "1",
            },
        )  # fmt: skip
        end = time.monotonic() + STARTS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"Triton did not start: {self.log[-4000:]}")
            time.sleep(0.2)

    @staticmethod
    def _libpython(environment: Path) -> str:
        code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
        run = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def request(self, method: str, path: str, body: Any = None, port: int | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        try:
            return self.request("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def generate(self, model: str, **body: Any) -> Any:
        status, data = self.request("POST", f"/v2/models/{model}/generate", body)
        assert status == 200, data
        return json.loads(data)

    def events(self, model: str, **body: Any) -> list[Any]:
        status, data = self.request("POST", f"/v2/models/{model}/generate_stream", body)
        assert status == 200, data
        return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]

    def backing(self, path: str) -> Any:
        """The JSON at `path` of the server behind: by its socket, as the models ask it."""
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(20)
            end.connect(str(self.repository / "lockstep.sock"))
            connection = http.client.HTTPConnection("localhost")
            connection.sock = end
            connection.request("GET", path)
            data = connection.getresponse().read()
            return data.decode() if path == "/metrics" else json.loads(data)

    @property
    def aborted(self) -> float:
        """Answers that were ended before their end, up to now."""
        lines = [line for line in self.backing("/metrics").splitlines() if "request_success_total" in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines if '"abort"' in line)

    def wait_idle(self) -> None:
        end = time.monotonic() + 20
        while (status := self.backing("/status"))["running"] or status["waiting"] or status["pages"]["used"]:
            assert time.monotonic() < end, status
            time.sleep(0.02)

    def wait_settled(self) -> None:
        """Until no model does anything: an ensemble's last steps come after the engine's."""
        end = time.monotonic() + 120
        before = b""
        while (now := self.request("GET", "/v2/models/stats")[1]) != before:
            assert time.monotonic() < end, now
            before = now
            time.sleep(1)

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> int:
        """End it; gives its exit code. Raises AssertionError where a process that it or its models started stays."""
        started = descendants(self.process.pid)
        assert any("lockstep_serve.engine_process" in command for command in started.values()), started
        self.process.send_signal(sent)
        code = self.process.wait(120)
        end = time.monotonic() + 180  # lockstep_watchdog.py takes 60 where a call holds the interpreter's lock
        while alive := {pid: command for pid, command in started.items() if command_of(pid) == command}:
            assert time.monotonic() < end, f"left: {alive}; {self.log[-3000:]}"
            time.sleep(0.1)
        return code

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if self.process.poll() is not None:
            return
        if kind is not None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            return
        self.wait_settled()
        assert self.stop() == 0, self.log[-3000:]
        assert not self.unfinished, self.log[-3000:]

    @property
    def unfinished(self) -> list[str]:
        """What its log says of requests that it waited for when it was ended."""
        return [line for line in self.log.splitlines() if line.endswith('in-flight inferences"') and " has " in line]


def descendants(pid: int) -> dict[int, str]:
    """Commands of the processes that `pid` started, and those did."""
    children = {}
    for path in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                children |= {child: command_of(child), **descendants(child)}
    return children


def command_of(pid: int) -> str:
    """Of a process that runs; of none, "". A zombie has none."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def write_repository(target: str, tree: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "lockstep", "triton", target, str(out), "--results", str(tree), *options]
    subprocess.run(command, check=True, capture_output=True)
