"""`many-models`: the cost of many fine-tunes in one engine set, on a CPU or a GPU.

A switch, from files and from page-locked memory; a step, and that of a model alone; and the time to the first token
where requests for all models come at random, most of them for few (Zipf).

In: a shape, and how many models of random weights. Out: a record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import options
from benchmarks.gpu import build_seconds, random_weights
from benchmarks.measure import deliver, read_json, spread, surroundings
from benchmarks.shapes import config_of
from lockstep import Advance, Assembly, CheckpointFiles, Engine, Model, ModelOptions, Request
from lockstep.backends import get_backend

OPTIONS = (
    options.SHAPE,
    options.choice("--precision", "fp16", "fp32", "w4a16"),
    options.choice("--backend", "cuda", "onnxruntime", "openvino", "tensorrt"),
    options.number("--models", 8, "Fine-tunes, each with other random weights."),
    options.number("--loaded", 4, "Models whose weights are in the device's memory at a time."),
    options.Option("--rate", "Requests a second.", 8.0, float, minimum=0.01),
    options.number("--requests", 400, "Requests in all."),
    options.path("--work", "Engines and weights go there.", default=Path("many-models")),
    options.rounds(),
    options.WRITE,
)
LIMITS = {"max_batch_size": 16, "max_num_tokens": 2048, "max_seq_len": 2048}
PROMPT = 256
NEW_TOKENS = 32
STEPS = 32
_ZIPF = 1.0  # exponent: the n-th model has 1/n of the first one's requests


def main(work: Path, shape: str, precision: str, write: Path | None, **settings: Any) -> None:
    """Measure switches, steps and first tokens of many fine-tunes that share one engine set."""
    graphs = work.absolute() / precision / "graphs"
    lockstep.export_config(read_json(config_of(shape)), precision, graphs)
    record = run(graphs / "assembly.json", work.absolute() / precision, **settings)
    deliver({"benchmark": "many-models", "shape": shape, "precision": precision, **record}, write)


def run(
    assembly_json: Path, work: Path, backend: str, models: int, loaded: int, rate: float, requests: int, rounds: int
) -> dict[str, Any]:
    """Build, and measure."""
    assembly = Assembly.load(assembly_json)
    engines = work / backend / "engines.json"
    takes = get_backend(backend).default_options()
    build_seconds(assembly_json, engines, backend, {name: size for name, size in LIMITS.items() if name in takes})
    weights = []
    for number in range(models):
        path = work / f"weights-{number}" / "weights.json"
        weights.append(path if path.is_file() else random_weights(assembly, path.parent, seed=number))
    alone = Model.open(engines, assembly_json, weights[0], options=ModelOptions(**LIMITS))
    alone.warm_up()
    seconds_alone = [_decode(alone) for _ in range(rounds)]
    del alone
    files = [CheckpointFiles(str(number), str(assembly_json), str(path)) for number, path in enumerate(weights)]
    opened = ModelOptions(**LIMITS, others=files[1:], max_bound=min(loaded, models))
    model = Model.open(engines, assembly_json, weights[0], options=opened)
    model.warm_up()
    seconds = [_decode(model) for _ in range(rounds)]
    return {
        "models": models,
        "loaded": min(loaded, models),
        "weights_bytes": read_json(weights[0])["files"][0]["size"],
        "step_seconds": {"alone": spread(seconds_alone), "one of many": spread(seconds)},
        "switch_seconds": _switches(model, weights),
        "zipf": _zipf(model, models, rate, requests),
        **surroundings("numpy", "onnxruntime"),
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


def _switches(model: Model, weights: list[Path]) -> dict[str, Any]:
    """Return the seconds of loads into the last network: of each checkpoint the first time, and again."""
    residency = model.checkpoints.residency
    last = residency.num_places - 1 if residency is not None else 0
    seconds: dict[str, list[float]] = {"first": [], "again": []}
    for times in seconds.values():
        for path in (*weights[last + 1 :], weights[last]):  # at last its own
            began = time.perf_counter()
            model.checkpoints.load(last, path)
            times.append(time.perf_counter() - began)
    return {name: spread(times) for name, times in seconds.items()}


def _zipf(model: Model, models: int, rate: float, count: int) -> Mapping[str, Any]:
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
    waits = sorted(first_tokens.values())
    return {
        "rate": rate,
        "requests": count,
        "loads": residency.loads if residency is not None else 0,
        "first_token_seconds": {f"p{q}": round(float(np.percentile(waits, q)), 4) for q in (50, 90, 99)},
        "tokens_per_second": round(count * NEW_TOKENS / (time.perf_counter() - began), 1),
    }
