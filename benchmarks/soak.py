"""`soak`: endurance of the server, under a mixed load for minutes.

Clients of `lockstep serve` disconnect, and its engine may be killed. In: a target that was built. Out: counts of
answers, and samples of memory, descriptors and pages.

The load is seeded, so a leak can be reproduced; when its requests arrive depends on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.measure import deliver, surroundings
from benchmarks.soak_requests import CANCELLED, FAILED, KINDS, Outcome, request, send, slow_grammar
from lockstep import CheckError, InputError

OPTIONS = (
    options.option("--target", "A target of a finished run, such as demo-llama/fp32/all; several share its engines, "
                   "and one is in memory at a time.", name="targets", many=True, required=True),
    options.RESULTS, options.option("--minutes", default=10, kind=float, minimum=0.1),
    options.number("--seed", 0, minimum=0),
    options.option("--kills", "Kill the engine once a minute.", False, bool),
    options.option("--kv-bytes", "The server's, so small that all of it is used.", "16M"), options.WRITE,
)  # fmt: skip
STARTS = 120.0  # seconds until a server must be ready
IDLE = 30.0  # seconds until it must be idle once nobody asks
WARM_UP = 10.0  # seconds
CLIENTS = 8  # at a time: twice the demo's slots, so that some always wait
CANCELS = 0.2  # share of requests whose clients leave
KILLS_EVERY = 60.0  # seconds
# a third of a run may have so much more memory than the one before: share, and bytes
GROWTH = 1.02
SLACK = 8 << 20
PROCESSES = ("api", "engine")


@dataclass(frozen=True)
class Sample:
    """What the processes held at a moment. rss: bytes; descriptors: open ones; both by name of the process."""

    rss: dict[str, int]
    descriptors: dict[str, int]
    pages_used: int


@dataclass
class Soak:
    """A run: outcomes of requests, a sample a second, kills of the engine.

    Of a kill also when the engine was up again.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)


class Server:
    """`lockstep serve` of targets, as a context. It is ended by SIGTERM, and must end by itself."""

    def __init__(self, targets: Sequence[str], results: Path, kv_bytes: str):
        # All of the pool is written within a minute: memory that is touched for the first time is no leak.
        arguments = ["--results", str(results), "--port", "0", "--kv-bytes", kv_bytes, "--max-loaded-models", "1"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "serve", *targets, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], STARTS)
        line = ""
        if readable:
            line = self._process.stdout.readline()
        ready = re.match(r"ready: http://\S+:(\d+) ", line)
        if ready is None:
            self._process.kill()
            self._process.wait()
            raise InputError(f"{', '.join(targets)}: expected a server ready within {STARTS:.0f} s, found {line!r}")
        self.port = int(ready[1])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(IDLE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise CheckError(f"server: expected it to end within {IDLE:.0f} s of SIGTERM, found it running") from None
        if code and error[0] is None:
            raise CheckError(f"server: expected exit code 0 after SIGTERM, found {code}")

    def status(self) -> dict[str, Any]:
        return self._get("/status")

    def models(self) -> list[str]:
        return [card["id"] for card in self._get("/v1/models")["data"]]

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    def engine(self) -> int | None:
        """Return the process id of the engine; None while there is none."""
        with contextlib.suppress(OSError):
            for path in Path("/proc", str(self._process.pid), "task").glob("*/children"):
                for child in path.read_text().split():
                    if b"lockstep_serve.engine_process" in Path("/proc", child, "cmdline").read_bytes():
                        return int(child)
        return None

    def sample(self) -> Sample | None:
        """Return what the server holds now; None while its engine starts."""
        pids = {"api": self._process.pid, "engine": self.engine()}
        try:
            rss = {name: _rss(pid) for name, pid in pids.items() if pid}
            descriptors = {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items() if pid}
        except OSError:
            return None  # the engine went in between
        if len(rss) < len(PROCESSES):
            return None
        return Sample(rss, descriptors, self.status()["pages"]["used"])

    def wait_idle(self, descriptors: dict[str, int] | None = None) -> Sample:
        """Wait, up to `IDLE` seconds, until no request runs or waits and no page is used; return a sample.

        descriptors: also wait until no more are open.
        """
        end = time.monotonic() + IDLE
        while True:
            status = self.status()
            sample = self.sample()
            if sample is not None:
                busy = status["running"] or status["waiting"] or status["streams"] or sample.pages_used
                is_leaking = descriptors and any(sample.descriptors[name] > descriptors[name] for name in PROCESSES)
                if not (busy or is_leaking) or time.monotonic() > end:
                    return sample
            elif time.monotonic() > end:
                raise CheckError(f"server: expected an engine within {IDLE:.0f} s, found none")
            time.sleep(0.1)


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(write: Path | None, **settings: Any) -> None:
    """Run the server for long under a mixed load whose clients leave.

    Memory, descriptors and pages are looked at all along.
    """
    record = run(**settings)
    faults = record["faults"]
    if not faults:
        deliver(record, write)
        return
    deliver(record, None)  # a record with faults is printed, and not kept
    message = f"soak: {faults[0]}"
    if len(faults) > 1:
        message += f"; {len(faults) - 1} more in `faults`"
    raise CheckError(message)


def run(targets: Sequence[str], results: Path, minutes: float, seed: int, kills: bool, kv_bytes: str) -> dict[str, Any]:
    """Soak a server, and return the record; its `faults` are the failed expectations."""
    soak = Soak()
    with Server(targets, results, kv_bytes) as server:
        models = server.models()
        _warm_up(server, soak, models, seed + 1)
        begin = server.wait_idle()
        _load(server, soak, models, 60 * minutes, seed, kills)
        end = server.wait_idle(begin.descriptors)
        metrics = server.status()
    record = {
        "benchmark": "soak", "target": " ".join(targets), "minutes": minutes, "seed": seed, "clients": CLIENTS,
        "kv_bytes": kv_bytes, "kills": len(soak.kills), "restarts": metrics["restarts"],
        **_record(soak, begin, end), "pages_total": metrics["pages"]["total"],
        **surroundings("onnxruntime", "starlette", "uvicorn", "llguidance"),
    }  # fmt: skip
    return {**record, "faults": faults(soak, begin, end)}


def _warm_up(server: Server, soak: Soak, models: Sequence[str], seed: int) -> None:
    """Have everything opened that is opened once.

    By a load, and by slow grammars at once for the engine's processes.
    """
    _load(server, Soak(outcomes=soak.outcomes), models, WARM_UP, seed, False)
    with ThreadPoolExecutor(CLIENTS) as pool:
        soak.outcomes += pool.map(lambda number: send(server.port, slow_grammar(models[0], number)), range(2 * CLIENTS))


def _load(server: Server, soak: Soak, models: Sequence[str], seconds: float, seed: int, kills: bool) -> None:
    """Let clients ask side by side, and look at the server every second."""
    end = time.monotonic() + seconds
    lock = threading.Lock()
    numbers: Iterator[int] = iter(range(1 << 60))

    def client() -> None:
        while time.monotonic() < end:
            with lock:
                number = next(numbers)
            outcome = send(server.port, request(models[number % len(models)], seed, number, CANCELS))
            with lock:
                soak.outcomes.append(outcome)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(CLIENTS)]
    if kills:
        threads.append(threading.Thread(target=_kill, args=(server, soak, end), daemon=True))
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        if (sample := server.sample()) is not None:
            soak.samples.append(sample)
        time.sleep(1)
    for thread in threads:
        thread.join()


def _kill(server: Server, soak: Soak, end: float) -> None:
    """Kill the engine every minute, from half a minute on. Notes until when the server was not ready."""
    due = time.monotonic() + KILLS_EVERY / 2
    while due < end:
        time.sleep(max(0.0, due - time.monotonic()))
        due += KILLS_EVERY
        restarts = server.status()["restarts"]
        pid = server.engine()
        if pid is None:
            continue
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while (status := server.status())["restarts"] == restarts or not status["ready"]:
            if time.monotonic() - began > STARTS:
                break
            time.sleep(0.05)
        soak.kills.append((began, time.monotonic()))


def _record(soak: Soak, begin: Sample, end: Sample) -> dict[str, Any]:
    requests: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        counts = Counter(outcome.status for outcome in soak.outcomes if outcome.kind == kind)
        requests[kind] = dict(sorted(counts.items()))
    memory = {}
    open_files = {}
    for name in PROCESSES:
        memory[name] = {
            "thirds": [round(nbytes / (1 << 20), 1) for nbytes in _thirds(soak.samples, name)],
            "max": round(max(sample.rss[name] for sample in soak.samples) / (1 << 20), 1),
        }
        open_files[name] = {
            "begin": begin.descriptors[name],
            "max": max(sample.descriptors[name] for sample in soak.samples),
            "end": end.descriptors[name],
        }
    pages = {"max": max(sample.pages_used for sample in soak.samples), "end": end.pages_used}
    num_cancelled = sum(outcome.status == CANCELLED for outcome in soak.outcomes)
    total = {"all": len(soak.outcomes), "cancelled": num_cancelled}
    return {"requests": {**total, "kinds": requests}, "rss_mib": memory, "descriptors": open_files, "pages_used": pages}


def _thirds(samples: Sequence[Sample], name: str) -> list[float]:
    """Return the median memory of each third of a run, in bytes."""
    size = len(samples) // 3
    rss = [sample.rss[name] for sample in samples]
    return [statistics.median(rss[third * size : (third + 1) * size]) for third in range(3)]


def faults(soak: Soak, begin: Sample, end: Sample) -> list[str]:
    """Return a line for each fault.

    A request may fail while an engine that was killed restarts. The engine's memory is checked only if none was
    killed: each engine is another process.
    """
    lines = []
    failed = [
        outcome for outcome in soak.outcomes if outcome.status == FAILED and not _is_of_a_kill(outcome, soak.kills)
    ]
    if failed:
        lines.append(f"requests: expected none to fail, found {len(failed)}, the first: {failed[0].fault}")
    if end.pages_used:
        lines.append(f"pages: expected 0 in use when nothing runs, found {end.pages_used}")
    for name in PROCESSES:
        if end.descriptors[name] > begin.descriptors[name]:
            lines.append(
                f"{name}: expected {begin.descriptors[name]} open descriptors when nothing runs, as before the load, "
                f"found {end.descriptors[name]}"
            )
        if name == "engine" and soak.kills:
            continue
        _, middle, last = _thirds(soak.samples, name)
        if last > GROWTH * middle + SLACK:
            lines.append(
                f"{name}: expected at most {GROWTH:g} times the memory of the middle third and {SLACK >> 20} MiB in "
                f"the last, {(GROWTH * middle + SLACK) / (1 << 20):.1f} MiB, found {last / (1 << 20):.1f}"
            )
    return lines


def _is_of_a_kill(outcome: Outcome, kills: Sequence[tuple[float, float]]) -> bool:
    return any(outcome.began < up and outcome.ended > killed for killed, up in kills)
