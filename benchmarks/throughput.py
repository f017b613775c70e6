"""`throughput`: the cost of serving: requests through the engine, compared with the bare steps they took.

And prefixes that are reused, sampling, and the scheduler alone.

In: a target of a finished run, or a checkpoint folder or shape as for `decode`. Out: medians of rounds, and ratios of
what ran in turn in one process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import options
from benchmarks.engine_sets import make_engines
from benchmarks.measure import deliver, in_turn, ratios, read_json, spread, surroundings
from benchmarks.shapes import checkpoint
from lockstep import Advance, Assembly, Engine, Model, ModelOptions, Request, Results, Sampling
from lockstep.runtime.scheduler import Scheduled, Scheduler, SchedulerOptions
from lockstep.step.pages import PagePool, PageTables

OPTIONS = (
    options.option(
        "--target", "A target of a finished run, with its limits; instead of models.", name="targets", many=True
    ),
    options.option(
        "--model", f"{options.MODEL_HELP}  [default: {', '.join(options.DEFAULT_MODELS)}]", (),
        name="models", many=True, metavar="FOLDER|SHAPE",
    ),
    options.number("--requests", 64),
    options.number("--batch", 16, "Of models: requests in flight together."),
    options.number("--mean-prompt", 128, "Tokens of a prompt."),
    options.number("--mean-new", 32, "New tokens of a request."),
    options.number("--prefix", 2048, "Tokens that prompts share.", 0),
    options.choice("--precision", "fp32", "fp16", help="Of models."),
    options.THREADS, options.RESULTS, options.rounds(), options.WRITE,
)  # fmt: skip
PACKAGES = ("numpy", "onnxruntime")
_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
_TAIL = 64  # tokens after the shared prefix
SAMPLED = Sampling(temperature=0.8, top_p=0.95)


def main(models: Sequence[str], targets: Sequence[str], write: Path | None, **settings: Any) -> None:
    """Compare requests through the engine with its bare steps.

    And reused prefixes, sampling, and the scheduler alone.
    """
    if not models and not targets:
        models = options.DEFAULT_MODELS
    deliver(run(models, targets, **settings), write)


def run(
    models: Sequence[str],
    targets: Sequence[str],
    precision: str,
    requests: int,
    batch: int,
    mean_prompt: int,
    mean_new: int,
    prefix: int,
    rounds: int,
    threads: int | None,
    results: Path,
) -> dict[str, Any]:
    """Measure each of `models` and of `targets`.

    `models` (folders or shapes) are made in `precision` for `batch` requests; `targets` in `results` take the limits of
    their run. See `measure`.
    """
    measured = {}
    for target in targets:
        limits = {name: read_json(Results(results).config())["limits"][name] for name in _LIMITS}
        opened = lockstep.open_model(target, results, threads=threads, **limits)
        measured[target] = measure(opened, requests, mean_prompt, mean_new, prefix, rounds)
    for name in models:
        with tempfile.TemporaryDirectory() as work:
            folder = checkpoint(name, Path(work))
            paths = make_engines(folder, precision, Path(work) / "results")
            allowed = Assembly.load(paths["assembly"]).max_position_embeddings
            length = max(prefix + 2 * _TAIL, 4 * (mean_prompt + mean_new))
            if allowed is not None:
                length = min(length, allowed)
            limits = {"max_batch_size": batch, "max_seq_len": length}
            opened = Model.open(
                paths["engines"], paths["assembly"], paths["weights"], options=ModelOptions(threads=threads, **limits)
            )
            measured[folder.name] = measure(opened, requests, mean_prompt, mean_new, prefix, rounds)
    measured_scheduler = {str(rows): scheduler_microseconds(rows) for rows in (16, 64, 256)}
    return {
        "benchmark": "throughput",
        **({"precision": precision} if models else {}),
        "models": measured,
        "scheduler_microseconds_per_step": measured_scheduler,
        **surroundings(*PACKAGES, threads=threads),
    }


def measure(model: Model, requests: int, mean_prompt: int, mean_new: int, prefix: int, rounds: int) -> dict[str, Any]:
    """Of one model:

    mixed: seconds of `requests` requests at once, lengths drawn around the means, through the engine, greedy and
    sampled, and of the steps that the engine took for the greedy ones, asked for one after another.
    prefix: seconds to the first token of a prompt of `prefix` + 64 tokens, cold, and when the prefix is there already;
    of as many whole chunks as a request has room for. None where it has none for one: the prefix of shorter prompts is
    not kept.
    """
    random = np.random.default_rng(0)
    room = model.max_seq_len
    lengths = [
        np.clip(random.normal(mean, mean / 4, requests).round().astype(int), 1, room // 2)
        for mean in (mean_prompt, mean_new)
    ]
    prompts = [random.integers(3, model.vocab_size, count) for count in lengths[0]]

    def through_engine(sampling: Sampling) -> list[tuple[Sequence[Advance], bool | Sequence[Advance]]]:
        engine = Engine(model, prefix_caching=False)
        steps = []
        step_tokens = model.step_tokens

        def recorded(advances: Sequence[Advance], following: bool | Sequence[Advance] = False) -> np.ndarray:
            steps.append((advances, following))
            return step_tokens(advances, following)

        model.step_tokens = recorded  # type: ignore[method-assign]
        try:
            for number, (prompt, new) in enumerate(zip(prompts, lengths[1])):
                of_one = Sampling(sampling.temperature, top_p=sampling.top_p, seed=number)
                engine.add(Request(prompt, int(new), sampling=of_one))
            for _ in engine.run():
                pass
        finally:
            del model.step_tokens
        return steps

    steps = through_engine(Sampling())

    def bare() -> None:
        for advances, following in steps:
            model.step_tokens(advances, following)
        for slot in range(model.max_batch_size):
            model.release(slot)

    times = in_turn(
        {
            "engine": lambda: _seconds(lambda: through_engine(Sampling())),
            "bare steps": lambda: _seconds(bare),
            "engine, sampled": lambda: _seconds(lambda: through_engine(SAMPLED)),
        },
        rounds,
    )
    tokens = int(sum(lengths[0]) + sum(lengths[1]))
    mixed = {
        "requests": requests,
        "prompt_tokens": int(sum(lengths[0])),
        "new_tokens": int(sum(lengths[1])),
        "steps": len(steps),
        "seconds": {name: spread(values) for name, values in times.items()},
        "tokens_per_second": round(tokens / spread(times["engine"])["median"], 1),
        "speed_of_engine_relative_to": ratios(times, "engine"),
    }
    shared = min(prefix, room - 2 * _TAIL) // model.chunk_size * model.chunk_size
    return {
        "max_batch_size": model.max_batch_size,
        "max_seq_len": room,
        "chunk_size": model.chunk_size,
        "mixed": mixed,
        "prefix": _prefix(model, shared, rounds, random) if shared > 0 else None,
    }


def _prefix(model: Model, prefix: int, rounds: int, random: np.random.Generator) -> dict[str, Any]:
    shared = random.integers(3, model.vocab_size, prefix)

    def first_token(engine: Engine) -> float:
        tail = random.integers(3, model.vocab_size, _TAIL)
        return _seconds(lambda: list(engine.run([Request(np.concatenate([shared, tail]), 1)])))

    warm = Engine(model)
    first_token(warm)
    times = in_turn(
        {"reused": lambda: first_token(warm), "cold": lambda: first_token(Engine(model, prefix_caching=False))}, rounds
    )
    return {
        "tokens": prefix,
        "seconds_to_first_token": {name: spread(values) for name, values in times.items()},
        "share_of_cold": round(spread(times["reused"])["median"] / spread(times["cold"])["median"], 4),
    }


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def scheduler_microseconds(rows: int, steps: int = 300) -> float:
    """Return the median microseconds of the scheduler's share of a step. `rows` requests decode in the step."""
    scheduler = Scheduler(PageTables(PagePool(rows * 40, 1), rows), SchedulerOptions(rows, 2048, 256))
    for _ in range(rows):
        scheduler.add(Scheduled(4, 2000))
    times = []
    for number in range(steps):
        start = time.perf_counter()
        scheduler.computed(scheduler.schedule())
        if number:
            times.append(time.perf_counter() - start)
    return round(float(np.median(times)) * 1e6, 1)
