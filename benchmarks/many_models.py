"""`many-models`: the cost of many fine-tunes in one engine set, and of a cold start, on a CPU or a GPU.

A switch, from files and from (page-locked) memory; a step alone, of a server with others, and while another model is
loaded; the time to the first token where requests for all models come at random, most of them for few (Zipf); and the
time from the start of a process to its first token.

In: nothing; shapes get random weights, and the fine-tunes of one are parts of one file. Out: a record, which
is written after each part.
"""

from __future__ import annotations

import functools
import http.client
import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import lockstep
from benchmarks import cold, options
from benchmarks.gpu import build_engines, is_gain, random_weights
from benchmarks.measure import deliver, read_json, recorder, spread, surroundings, write_json
from benchmarks.serving import Place, Server
from benchmarks.shapes import config_of
from lockstep import Advance, Assembly, CheckpointFiles, Engine, Model, ModelOptions, Request, processes
from lockstep.backends.base import get_backend


@dataclass(frozen=True)
class Part:
    """What one process measures: the function, the shape, and how many models there are and are loaded."""

    measure: str
    shape: str
    precision: str = "fp16"
    models: int = 1
    loaded: int = 1


PARTS = {
    "cold-start": Part("cold_start", "llama-3.1-8b"),
    "switch": Part("switches", "llama-2-7b", models=3, loaded=2),
    "switch-w4a16": Part("switches", "llama-2-7b", "w4a16", models=3, loaded=2),
    "requests": Part("requests", "qwen2.5-0.5b", models=100, loaded=32),
}
OPTIONS = (
    options.option("--part", "A part to measure; may be given several times.", tuple(PARTS), name="parts", many=True,
                   choices=tuple(PARTS)),
    options.path("--work", "Engines and weights go there: 36 GB for all parts.", default=Path("many-models")),
    options.choice("--backend", "cuda", "onnxruntime", "openvino", "tensorrt"),
    options.option("--shape", "Another shape, or a config.json, for all parts.  [default: of each part its own]"),
    options.option("--precision", "Another precision for all parts."),
    options.number("--models", None, "Other numbers of models for the parts with several."),
    options.number("--loaded", None, "Models whose weights are in the device's memory at a time."),
    options.option("--rate", "Requests a second.", 8.0, float, minimum=0.01),
    options.number("--requests", 400, "Requests in all.", name="count"),
    options.rounds(3),
    options.WRITE,
)  # fmt: skip
LIMITS = {"max_batch_size": 16, "max_num_tokens": 2048, "max_seq_len": 2048}
PROMPT = 256
NEW_TOKENS = 32
STEPS = 32
_ZIPF = 1.0  # exponent: the n-th model has 1/n of the first one's requests
_MOVED = 1 << 16  # bytes from a tensor of a model to that of the next one
_DISK = 1 << 30  # bytes that are read to measure a disk
_CPUS_OF_A_BUILD = 4


def main(
    parts: Sequence[str], work: Path, backend: str, shape: str | None, precision: str | None, models: int | None,
    loaded: int | None, rate: float, count: int, rounds: int, write: Path | None,
) -> None:  # fmt: skip
    """Measure switches, steps, first tokens of many fine-tunes that share one engine set, and cold starts.

    All parts take some six minutes on one H200, and 128 GB of memory:

        python -m benchmarks many-models --work FOLDER

    What is made in --work is used again. The record is many-models.json there, and on stdout.
    """
    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    chosen = {}
    for name in parts:
        part = PARTS[name]
        number = models or part.models
        if part.models == 1:
            number = 1
        number_loaded = min(loaded or part.loaded, number)
        chosen[name] = Part(part.measure, shape or part.shape, precision or part.precision, number, number_loaded)
    record: dict[str, Any] = {"benchmark": "many-models", "backend": backend, "parts": {}}
    note = recorder(work / "many-models.json", record)
    needed: dict[Path, tuple[Part, int]] = {}
    for part in chosen.values():
        folder = _folder(work, part)
        needed[folder] = part, max(part.models, needed.get(folder, (part, 1))[1])
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // _CPUS_OF_A_BUILD)) as pool:
        pending = []
        for folder, (part, most) in needed.items():
            arguments = {"shape": part.shape, "precision": part.precision, "backend": backend, "models": most}
            pending.append(pool.submit(cold.ask, "benchmarks.many_models:prepare", work=str(folder), **arguments))
        for future in pending:
            future.result()
    note(**surroundings("numpy"))
    for name, part in chosen.items():
        arguments = {"rounds": rounds, "loaded": part.loaded, "rate": rate, "count": count, "models": part.models}
        place = {"work": str(_folder(work, part)), "backend": backend}
        figures = cold.ask(f"benchmarks.many_models:{part.measure}", **place, **arguments)
        about = {"shape": _name(part.shape), "precision": part.precision, "models": part.models}
        record["parts"][name] = {**about, "loaded": part.loaded, **figures}
        note()
    deliver(record, write)


def _folder(work: Path, part: Part) -> Path:
    return work / f"{_name(part.shape)}-{part.precision}"


def _name(shape: str) -> str:
    return Path(shape).name.removesuffix(".json")


def prepare(shape: str, precision: str, work: str, backend: str, models: int) -> None:
    """Make graphs, engines, and the weights of all models, unless they are there."""
    folder = Path(work)
    assembly_json = folder / "graphs" / "assembly.json"
    if not assembly_json.is_file():
        lockstep.export_config(read_json(config_of(shape)), precision, assembly_json.parent)
    engines = folder / backend / "engines.json"
    if not engines.is_file():
        takes = get_backend(backend).default_options()
        limits = {name: size for name, size in LIMITS.items() if name in takes}
        build_engines(str(assembly_json), backend, str(engines), limits)
    if len(_weights(folder)) < models:
        fine_tunes(Assembly.load(assembly_json), folder, models)


def fine_tunes(assembly: Assembly, folder: Path, models: int) -> None:
    """Make the weights of models in one file: each tensor but gains begins later in it than that of the model
    before, so that no two are equal, though the file is hardly larger than one model's."""
    first = read_json(random_weights(assembly, folder / "weights", room=models * _MOVED))
    for number in range(models):
        tensors = {}
        for name, place in first["tensors"].items():
            moved = 0 if is_gain(name, place["shape"]) else number * _MOVED
            tensors[name] = {**place, "offset": place["offset"] + moved}
        write_json(folder / "weights" / f"model-{number:03}.json", {**first, "tensors": tensors})


def _weights(folder: Path) -> list[Path]:
    return sorted((folder / "weights").glob("model-*.json"))


def _open(folder: Path, backend: str, models: int, loaded: int) -> Model:
    processes.share_interpreter()  # as a server does
    assembly = str(folder / "graphs" / "assembly.json")
    first, *others = _weights(folder)[:models]
    files = [CheckpointFiles(str(number), assembly, str(path)) for number, path in enumerate(others, start=1)]
    limits = ModelOptions(**LIMITS, others=files, max_bound=loaded)
    return Model.open(folder / backend / "engines.json", assembly, first, options=limits)


def switches(work: str, backend: str, models: int, loaded: int, rounds: int, **_: Any) -> dict[str, Any]:
    """Return the seconds of steps and of switches."""
    folder = Path(work)
    weights = _weights(folder)[:models]
    alone = _open(folder, backend, 1, 1)
    alone.warm_up()
    seconds_alone = [_decode(alone) for _ in range(rounds)]
    del alone
    model = _open(folder, backend, models, loaded)
    before = _switch_each(model, loaded, weights)
    model.warm_up()
    seconds = [_decode(model) for _ in range(rounds)]
    again = []
    for _ in range(rounds):
        again += _switch_each(model, loaded, weights)
    beside = _steps_beside(model, loaded - 1, [*weights[loaded:], weights[loaded - 1]] * rounds)
    tensors = read_json(weights[0])["tensors"].values()
    return {
        "weights_bytes": sum(place["length"] for place in tensors),
        "step_seconds": {
            "alone": spread(seconds_alone),
            "one of many": spread(seconds),
            "while another is loaded": spread(beside),
        },
        "switch_seconds": {"from the file": spread(before), "from memory": spread(again)},
    }


def _decode(model: Model) -> float:
    """Return the seconds of a step of one row, of the first checkpoint."""
    model.step_tokens([Advance(0, np.arange(16), 0)])
    token = [1]
    model.step_tokens([Advance(0, token, 16)])
    began = time.perf_counter()
    for number in range(STEPS):
        model.step_tokens([Advance(0, token, 17 + number)])
    seconds = (time.perf_counter() - began) / STEPS
    model.release(0)
    return seconds


def _switch_each(model: Model, loaded: int, weights: Sequence[Path]) -> list[float]:
    """Load another model into the last network, and then its own weights; return the seconds of each."""
    seconds = []
    for path in (*weights[loaded:], weights[loaded - 1]):
        began = time.perf_counter()
        model.checkpoints.load(loaded - 1, path).finish()
        seconds.append(time.perf_counter() - began)
    return seconds


def _steps_beside(model: Model, network: int, cycle: Sequence[Path]) -> list[float]:
    """Return the seconds of steps of the first checkpoint while others are loaded into another network."""
    if network == 0:  # there is one alone
        return [0.0]
    seconds = []
    for weights in cycle:
        model.step_tokens([Advance(0, np.arange(16), 0)])
        load = model.checkpoints.load(network, weights)
        for number in range(STEPS):
            began = time.perf_counter()
            model.step_tokens([Advance(0, [1], 16 + number)])
            seconds.append(time.perf_counter() - began)
            if load.done():
                break
        load.finish()
        model.release(0)
    return seconds


def requests(work: str, backend: str, models: int, loaded: int, rate: float, count: int, **_: Any) -> Mapping[str, Any]:
    """Return the times to the first tokens of requests that come at random for all models."""
    began = time.perf_counter()
    model = _open(Path(work), backend, models, loaded)
    warm_up = model.warm_up_parts()
    next(warm_up, None)
    ready = time.perf_counter() - began
    for _ in warm_up:  # a server does so while there are no requests
        pass
    warm = time.perf_counter() - began
    random = np.random.default_rng(0)
    shares = 1 / np.arange(1, models + 1) ** _ZIPF
    chosen = random.choice(models, count, p=shares / shares.sum())
    arrivals = np.cumsum(random.exponential(1 / rate, count))
    prompts = random.integers(0, model.vocab_size, (count, PROMPT))
    engine = Engine(model)
    first_tokens: dict[int, float] = {}
    sent = 0
    began = time.perf_counter()
    while sent < count or engine.has_work:
        now = time.perf_counter() - began
        while sent < count and arrivals[sent] <= now:
            name = str(chosen[sent]) if chosen[sent] else ""
            engine.add(Request(prompts[sent], NEW_TOKENS, checkpoint=name), sent)
            sent += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[sent] - now))
            continue
        tokens = engine.step()
        now = time.perf_counter() - began
        for token in tokens:
            first_tokens.setdefault(token.request, now - arrivals[token.request])
    residency = model.checkpoints.residency
    waits = [first_tokens[number] for number in sorted(first_tokens)]
    return {
        "ready_seconds": round(ready, 2),
        "warm_seconds": round(warm, 2),  # with all weights in page-locked memory that it has room for
        "rate": rate,
        "requests": count,
        "loads": residency.loads if residency is not None else 0,
        "first_token_seconds": {"all": _percentiles(waits), "second half": _percentiles(waits[count // 2 :])},
        "tokens_per_second": round(count * NEW_TOKENS / (time.perf_counter() - began), 1),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(seconds, q)), 4) for q in (50, 90, 99, 100)}


def _spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    spreads = {}
    for name in rounds[0]:
        spreads[name] = spread([figures[name] for figures in rounds], 3)
    return spreads


def cold_start(work: str, backend: str, rounds: int, **_: Any) -> dict[str, Any]:
    """Return the seconds from the start of a process to its first token: of a model, and of a server."""
    folder = Path(work)
    start = functools.partial(_start, folder, backend)
    data = folder / "weights" / "weights.bin"
    figures: dict[str, Any] = {"weights_bytes": data.stat().st_size, "first": start()}
    warm = [start() for _ in range(rounds)]
    figures["warm"] = _spreads(warm)
    place = Place(
        str(folder / backend / "engines.json"),
        str(folder / "graphs" / "assembly.json"),
        str(_weights(folder)[0]),
        LIMITS,
    )
    servers = [_serve(place) for _ in range(2)][1:]  # the first one makes a tokenizer
    figures["server"] = _spreads(servers)
    _drop_from_cache(data)
    figures["cold disk"] = start()
    figures["disk_bytes_per_second"] = _disk_rate(data)
    return figures


def _start(folder: Path, backend: str) -> dict[str, float]:
    """Return how many seconds after its start a process has opened a model, has its weights, and a first token."""
    began = time.time()
    times = cold.ask("benchmarks.many_models:first_token", work=str(folder), backend=backend)
    return {name: round(at - began, 3) for name, at in times.items()}


def first_token(work: str, backend: str) -> dict[str, float]:
    """When this process has its modules, a model, and the first token of a request: seconds since 1970."""
    folder = Path(work)
    times = {"modules": time.time()}
    assembly = folder / "graphs" / "assembly.json"
    model = Model.open(folder / backend / "engines.json", assembly, _weights(folder)[0], options=ModelOptions(**LIMITS))
    times["opened"] = time.time()
    model.step_tokens([Advance(0, np.arange(16), 0)])
    times["token"] = time.time()
    model.warm_up()
    times["warm"] = time.time()
    return times


def _serve(place: Place) -> dict[str, float]:
    """Return how many seconds after its start a server is ready, and has answered with a token."""
    began = time.perf_counter()
    with Server(place) as server:
        ready = time.perf_counter() - began
        parts = urlsplit(server.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        body = {"prompt": [[5] * 16], "max_tokens": 1, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        connection.close()
        token = time.perf_counter() - began
        return {"ready": ready, "token": token, "warm": server.wait_until_warm()}


def _drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # pages that are not written yet stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_rate(path: Path) -> float | None:
    """Return bytes a second of reads past the cache by four threads; None where the file system has none."""
    length = min(_DISK, path.stat().st_size // 4) >> 22 << 22

    def read(number: int) -> None:
        buffer = mmap.mmap(-1, 1 << 22)
        end = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            for start in range(number * length, (number + 1) * length, len(buffer)):
                os.preadv(end, [buffer], start)
        finally:
            os.close(end)

    began = time.perf_counter()
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
    except OSError:
        return None
    return round(4 * length / (time.perf_counter() - began))
