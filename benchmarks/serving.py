"""`serving`: the cost of the server compared with the bare engine, and the latency of its answers.

In: engines, assembly and weights of one model. Out: tokens a second through `lockstep serve`'s server and through
the engine alone, in turn; CPU time of the API process for a token; the time of a refusal by a full queue; and, at given
rates of requests, the times of the answers (`benchmarks/load.py`), of this server and of others that are given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import math
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import cold, options
from benchmarks.load import load
from benchmarks.measure import deliver, spread, surroundings
from benchmarks.shapes import checkpoint
from lockstep import Assembly, Engine, InputError, Model, ModelOptions, Request

OPTIONS = (
    options.MODELS, options.number("--streams", 4, "Requests at a time."),
    options.number("--threads", None, "CPU threads of the engine.  [default: one core is left]"),
    options.option("--precision", "Of the engines.", "fp32"), options.path("--work", "Keeps models and engines."),
    options.rounds(), options.WRITE,
)  # fmt: skip
PACKAGES = ("numpy", "starlette", "uvicorn", "uvloop")
STARTS = 600.0  # seconds that a server may take until it is ready
# tokens of each request in the comparison with the bare engine
STREAMS_PROMPT = 32
STREAMS_NEW = 256
# tokens of each request at a rate
PROMPT = 512
NEW = 128
# streams that a long prompt comes to, their tokens, and its own
QUIET = 8
QUIET_NEW = 1024
LONG = 4000
# of the server, of one request, and those that are timed
MAX_QUEUE = 4096
MOST_PROMPTS = 256
REFUSALS = 200
KEPT = (
    "completed", "duration_s", "requests_per_s", "output_tokens_per_s", "ttft_p50_ms",
    "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tpot_mean_ms", "latency_p50_ms", "latency_p99_ms",
    "client_lag_p99_s", "send_delay_p99_ms",
)  # fmt: skip


def main(
    models: Sequence[str],
    streams: int,
    threads: int | None,
    precision: str,
    work: Path | None,
    rounds: int,
    write: Path | None,
) -> None:
    """Compare the server with the bare engine on this CPU. In tokens/s, and in CPU time of the API process."""
    used = threads or max(1, len(os.sched_getaffinity(0)) - 1)
    with tempfile.TemporaryDirectory() as scratch:
        deliver(measured(models, precision, work or Path(scratch), streams, rounds, used), write)


@dataclasses.dataclass(frozen=True)
class Place:
    """The model that is served.

    limits: max_batch_size, max_seq_len, max_num_tokens.
    """

    engines: str
    assembly: str
    weights: str
    limits: Mapping[str, int]
    threads: int | None = None
    kv_bytes: int | None = None


def model(name: str, precision: str, work: Path, batch: int, threads: int) -> Place:
    """Make a checkpoint folder or a shape into an ONNX Runtime engine set in `work`. A shape gets random weights."""
    from benchmarks.engine_sets import make_engines

    paths = make_engines(checkpoint(name, work), precision, work / "results")
    limits = {"max_batch_size": batch, "max_seq_len": 512, "max_num_tokens": 512, "max_input_len": 512}
    engines, assembly, weights = (str(paths[key].resolve()) for key in ("engines", "assembly", "weights"))
    return Place(engines, assembly, weights, limits, threads)


def run(place: Place, streams: Sequence[int], rates: Sequence[str], requests: int, rounds: int, long: bool,
        other_servers: Mapping[str, str] | None = None, in_turn: bool = False,
        note: Callable[..., None] = lambda **parts: None) -> dict[str, Any]:  # fmt: skip
    """Measure everything.

    other_servers: {name: address} of running servers that get the same requests. in_turn: take rounds of the bare
    engine between those of the server, not after all of them: the two would share a GPU's memory. note: gets the
    figures after each part.
    """
    figures: dict[str, Any] = {"streams": {}, "rates": {}}
    with Server(place) as server:
        figures["ready_seconds"] = round(server.ready_seconds, 2)
        figures["warm_seconds"] = round(server.wait_until_warm(), 2)
        for number in streams:
            if in_turn:
                speeds = _in_turn_with_bare(server, place, number, rounds)
            else:
                speeds = server.streams(number, rounds)
            figures["streams"][str(number)] = speeds
            note(**figures)
        addresses = {"lockstep": server.url, **(other_servers or {})}
        for rate in rates:
            figures["rates"][rate] = {name: at_rate(url, rate, requests) for name, url in addresses.items()}
            note(**figures)
        if long:
            figures["long_prompt"] = {name: long_prompt(url) for name, url in addresses.items()}
            note(**figures)
        figures["refusal_ms"] = server.refusals()
    if in_turn:
        return figures
    for number in streams:
        _add_bare(figures["streams"][str(number)], _bare(place, number, rounds))
    return figures


def _in_turn_with_bare(server: Server, place: Place, number: int, rounds: int) -> dict[str, Any]:
    """Measure the server and the bare engine in turn, which have a CPU alone where no request runs."""
    served = []
    speeds = []
    for at in range(rounds):
        served.append(server.streams(number, 1, seed=2 * at))
        speeds += _bare(place, number, 1)
    medians = {}
    for key in served[0]:
        medians[key] = spread([figures[key]["median"] for figures in served], 1)
    return _add_bare(medians, speeds)


def _bare(place: Place, number: int, rounds: int) -> list[float]:
    return cold.ask("benchmarks.serving:bare", place=_json(place), streams=number, rounds=rounds)


def _add_bare(served: dict[str, Any], speeds: Sequence[float]) -> dict[str, Any]:
    served["bare_tokens_per_second"] = spread(speeds, 1)
    served["of_bare"] = round(served["tokens_per_second"]["median"] / statistics.median(speeds), 3)
    return served


def measured(
    names: Sequence[str], precision: str, work: Path, streams: int, rounds: int, threads: int
) -> dict[str, Any]:
    """Measure models on this CPU. threads: of the engine, besides the API process."""
    by_model = {}
    for name in names:
        place = model(name, precision, work, streams, threads)
        by_model[Path(name).name] = run(place, [streams], [], 0, rounds, long=False, in_turn=True)
    about = {"benchmark": "serving", "precision": precision, "models": by_model}
    return {**about, **surroundings(*PACKAGES, threads=threads)}


def _json(place: Place) -> dict[str, Any]:
    return dataclasses.asdict(place)


def bare(place: Mapping[str, Any], streams: int, rounds: int) -> list[float]:
    """Measure new tokens a second of `streams` requests at once through the engine. Returns one number a round."""
    limits = {name: place["limits"][name] for name in ("max_batch_size", "max_seq_len", "max_num_tokens")}
    opened = Model.open(
        Path(place["engines"]),
        Path(place["assembly"]),
        Path(place["weights"]),
        options=ModelOptions(**limits, threads=place["threads"], kv_bytes=place["kv_bytes"]),
    )
    opened.warm_up()
    speeds = []
    for number in range(rounds + 1):
        draw = np.random.default_rng(number)
        requests = [Request(draw.integers(3, opened.vocab_size, STREAMS_PROMPT), STREAMS_NEW) for _ in range(streams)]
        began = time.perf_counter()
        tokens = sum(1 for _ in Engine(opened, prefix_caching=False).run(requests))
        speeds.append(tokens / (time.perf_counter() - began))
    return speeds[1:]


class Server:
    """A server in a child process, as `lockstep serve` runs it. Use as a context."""

    def __init__(self, place: Place):
        self._place = place

    def __enter__(self) -> Server:
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving", json.dumps(dataclasses.asdict(self._place))],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], STARTS)
        line = ""
        if readable:
            line = self._process.stdout.readline()
        self.ready_seconds = time.perf_counter() - self._began
        ready = re.match(r"ready: (http://\S+) ", line)
        if ready is None:
            self.__exit__()
            raise InputError(f"server: expected it ready within {STARTS:.0f} s, found {line!r}")
        self.url = ready[1]
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait_until_warm(self) -> float:
        """Return the seconds from the start until no step waits for a graph capture."""
        while True:
            with contextlib.closing(http.client.HTTPConnection(*self._place_of(), timeout=60)) as connection:
                connection.request("GET", "/health")
                if json.load(connection.getresponse())["warm"]:
                    return time.perf_counter() - self._began
            time.sleep(0.05)

    def streams(self, number: int, rounds: int, seed: int = 0) -> dict[str, Any]:
        """Measure new tokens a second of `number` streams at once.

        And microseconds of the API process's CPU for each token.
        """
        speeds = []
        costs = []
        for at in range(rounds + 1):
            before = _cpu_seconds(self._process.pid)
            figures = load(self.url, STREAMS_PROMPT, STREAMS_NEW, math.inf, number, seed + at)
            spent = _cpu_seconds(self._process.pid) - before
            tokens = figures["output_tokens_per_s"] * figures["duration_s"]
            if at:
                speeds.append(figures["output_tokens_per_s"])
                costs.append(1e6 * spent / tokens)
        return {"tokens_per_second": spread(speeds, 1), "api_cpu_microseconds_per_token": spread(costs, 1)}

    def refusals(self) -> dict[str, float]:
        """Return the milliseconds from a request of MOST_PROMPTS prompts to its refusal with 429 by a full queue.

        Many prompts, since slots become free at any time, and the queue has room for a few again.
        """
        times = []
        with contextlib.ExitStack() as stack:
            for _ in range((MAX_QUEUE + self._place.limits["max_batch_size"]) // MOST_PROMPTS):
                self._ask(stack, [[5]] * MOST_PROMPTS)
            time.sleep(1)  # they are read
            for _ in range(REFUSALS):
                began = time.perf_counter()
                status = self._ask(stack, [[5]] * MOST_PROMPTS).getresponse().status
                times.append(1e3 * (time.perf_counter() - began))
                if status != 429:
                    raise InputError(f"server: expected status 429 of a full queue, found {status}")
        return {name: round(float(np.percentile(times, at)), 3) for name, at in (("p50", 50), ("p99", 99))}

    def _ask(self, stack: contextlib.ExitStack, prompt: Sequence[Sequence[int]]) -> http.client.HTTPConnection:
        """Send a request for as many tokens as there is room for, which ends with `stack`."""
        connection = http.client.HTTPConnection(*self._place_of(), timeout=60)
        stack.callback(connection.close)
        body = {"prompt": prompt, "max_tokens": None, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        return connection

    def _place_of(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0


def _cpu_seconds(pid: int) -> float:
    """That a process had so far, all its threads."""
    return sum(int(path.read_text().split()[0]) for path in Path("/proc", str(pid), "task").glob("*/schedstat")) / 1e9


def at_rate(url: str, rate: str, requests: int) -> dict[str, float | None]:
    """Requests that come at random times, `rate` a second, or all at once."""
    load(url, PROMPT, NEW, math.inf, 4, seed=1)  # whatever the first requests would pay
    figures = load(url, PROMPT, NEW, float(rate), requests)
    return {name: _rounded(figures.get(name)) for name in KEPT}


def long_prompt(url: str) -> dict[str, Any]:
    """Measure the gaps between tokens of QUIET streams. Alone, and while a prompt of LONG tokens comes."""
    quiet = load(url, 16, QUIET_NEW, math.inf, QUIET, seed=2)
    with ThreadPoolExecutor(1) as threads:
        streams = threads.submit(load, url, 16, QUIET_NEW, math.inf, QUIET, seed=3)
        time.sleep(1)  # the streams are under way
        alone = load(url, LONG, 2, math.inf, 1, seed=4)
        disturbed = streams.result()
    return {"quiet_ms": _gaps(quiet), "beside_ms": _gaps(disturbed), "its_ttft_ms": _rounded(alone["ttft_p50_ms"])}


def _gaps(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _rounded(figures[f"itl_{name}_ms"]) for name in ("p50", "p99", "max")}


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    return round(value, 3)


def serve(place: Place) -> None:
    """Serve until SIGTERM; the first line says where. Without a tokenizer of all ids each token id is a word."""
    from lockstep_serve.bodies import Access
    from lockstep_serve.run import Address
    from lockstep_serve.run import serve as run_server
    from lockstep_serve.service import Service
    from lockstep_serve.settings import EngineOptions, ServedModelOptions, ServiceLimits, ServiceOptions

    options = EngineOptions(
        place.engines, place.assembly, place.weights, "all",
        {"max_input_len": place.limits["max_seq_len"], **place.limits},
        place.threads, place.kv_bytes, prefix_caching=False,
    )  # fmt: skip
    limits = ServiceLimits(max_queue=MAX_QUEUE, queue_timeout=600, start=STARTS)
    service = Service(ServiceOptions([ServedModelOptions("model", _tokenizer(place))], options, limits))
    run_server(service, Address(port=0), Access(), 0, lambda line: print(line, flush=True))


def _tokenizer(place: Place) -> Any:
    """Return the assembly's tokenizer, or one of as many words, kept with the weights."""
    from lockstep import Tokenizer

    assembly = Assembly.load(Path(place.assembly))
    import tokenizers

    if assembly.tokenizer is not None:
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(place.assembly).parent / assembly.tokenizer.file))
        # Not a random model's, which has bytes alone: most of its tokens have no text, and would not be sent.
        if tokenizer.get_vocab_size() >= assembly.vocab_size:
            return Tokenizer.open(place.assembly)
    path = Path(place.weights).with_name(f"words-{assembly.vocab_size}.json")
    if not path.is_file():
        words = {f"w{token}": token for token in range(assembly.vocab_size)}
        word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        word_level.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        word_level.save(str(path))
    return Tokenizer(path)


if __name__ == "__main__":
    serve(Place(**json.loads(sys.argv[1])))
