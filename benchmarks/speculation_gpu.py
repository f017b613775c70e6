"""`speculation-gpu`: what drafts gain on a GPU, with a model's shape and random weights.

Drafts are recorded answers in which each token is wrong with a probability. Out: by number of requests and share of
right tokens, the seconds of answers with drafts and of plain ones, in turn, whose tokens must be the same; of a step
that verifies, and of a plain one; and the cost of looking for n-grams in a text without any.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import cold, options
from benchmarks.gpu import described, open_random, record_path
from benchmarks.measure import in_turn, ratios, read_json, recorder, spread
from benchmarks.shapes import config_of
from lockstep import Assembly, CheckError, Engine, Model, NgramDrafter, Request, Sampling, Speculation
from lockstep.verify.golden.drafted import RecordedDrafter

LIMITS = {"max_batch_size": 64, "max_num_tokens": 2048, "max_seq_len": 2048}
PROMPT = 512
NEW = 256
DRAFT_TOKENS = 4
REQUESTS = (1, 4, 16)
RIGHT = (0.0, 0.6, 0.8, 1.0)
OPTIONS = (
    options.option("--shape", "A shape that comes with the benchmark, or a config.json.", "llama-3.1-8b"),
    options.number("--layers", None, "Layers of the shape; by default all.", maximum=200),
    *options.ON_A_GPU,
)  # fmt: skip


def main(
    shape: str, layers: int | None, backend: str, work: Path, build_options: dict[str, Any],
    rounds: int, write: Path | None,
) -> None:  # fmt: skip
    """Compare answers with drafts and plain ones on one GPU, in fp16 with random weights."""
    cold.ask("benchmarks.gpu:device", backend=backend)
    out = record_path(write, work, "speculation", backend)
    config = read_json(config_of(shape))
    if layers:
        config["num_hidden_layers"] = layers
    lockstep.export_config(config, "fp16", work / "graphs")
    names = {"assembly": str(work / "graphs" / "assembly.json"), "work": str(work), "out": str(out)}
    cold.ask("benchmarks.speculation_gpu:measure", **names, backend=backend, options=build_options, rounds=rounds)
    print(out)


def measure(assembly: str, work: str, out: str, backend: str, options: dict[str, Any], rounds: int) -> None:
    """Build, open, measure, and write the record after each part."""
    note = recorder(Path(out), {"benchmark": "speculation-gpu", "layers": len(Assembly.load(assembly).layers)})
    model = open_random(assembly, Path(work), backend, {**LIMITS, **options})
    note(**described(model.engines.path), prompt_tokens=PROMPT, new_tokens=NEW, draft_tokens=DRAFT_TOKENS)
    by_requests = {}
    for count in REQUESTS:
        by_requests[str(count)] = _answers(model, count, rounds)
        note(requests=by_requests)


def _answers(model: Model, count: int, rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(count)
    prompts = [random.integers(0, model.vocab_size, PROMPT) for _ in range(count)]
    greedy = [Request(prompt, NEW) for prompt in prompts]
    drawn = [Request(prompt, NEW, sampling=Sampling(1.0, seed=1)) for prompt in prompts]
    plain, _, _ = _run(model, greedy, None)
    drafters = {str(right): RecordedDrafter(_planted(plain, right, random), 10**9) for right in RIGHT}
    drafts = dict[str, list[tuple[int, Speculation]]]()

    def seconds(requests: list[Request], drafter: RecordedDrafter | NgramDrafter | None, name: str) -> float:
        speculation = drafter and Speculation(drafter, DRAFT_TOKENS)
        tokens, duration, steps = _run(model, requests, speculation)
        if requests is greedy and tokens != plain:
            raise CheckError("speculation: expected the plain answer with drafts, found another one")
        if speculation:
            drafts.setdefault(name, []).append((steps, speculation))
        return duration

    calls = {"plain": lambda: seconds(greedy, None, "plain"), "plain, drawn": lambda: seconds(drawn, None, "plain")}
    for name, drafter in drafters.items():
        calls[name] = lambda name=name, drafter=drafter: seconds(greedy, drafter, name)  # type: ignore[misc]
    calls["n-grams, drawn"] = lambda: seconds(drawn, NgramDrafter(), "n-grams, drawn")
    for call in calls.values():
        call()  # graphs are captured
    drafts.clear()
    times = in_turn(calls, rounds)
    by_drafter: dict[str, Any] = {}
    for name in [*drafters, "n-grams, drawn"]:
        steps, speculation = drafts[name][-1]
        plain_name = "plain, drawn" if "drawn" in name else "plain"
        by_drafter[name] = {
            "speed_relative_to_plain": ratios(times, name)[plain_name],
            "steps": steps,
            "draft_tokens": speculation.num_draft_tokens,
            "accepted_by_position": speculation.accepted,
        }
    steps = by_drafter["1.0"]["steps"]
    by_step = {
        "1.0": [seconds / steps for seconds in times["1.0"]],
        "plain": [seconds / NEW for seconds in times["plain"]],
    }
    by_drafter["1.0"]["plain_steps_of_a_verify"] = ratios(by_step, "plain")["1.0"]
    return {"seconds": {name: spread(values) for name, values in times.items()}, "right": by_drafter}


def _run(
    model: Model, requests: list[Request], speculation: Speculation | None
) -> tuple[dict[tuple[int, int], list[int]], float, int]:
    """Return tokens by request and choice, and the seconds and steps from the first token of all on."""
    engine = Engine(model, prefix_caching=False, speculation=speculation)
    tokens: dict[tuple[int, int], list[int]] = {}
    engine.add_all(requests)
    began = 0.0
    steps = 0
    try:
        while engine.has_work:
            for token in engine.step():
                tokens.setdefault((token.request, token.choice), []).append(token.token)
            if len(tokens) == len(requests):
                began = began or time.perf_counter()
                steps = steps + 1
    finally:
        engine.close()
    return tokens, time.perf_counter() - began, steps


def _planted(
    answers: Mapping[tuple[int, int], list[int]], right: float, random: np.random.Generator
) -> dict[tuple[int, int], list[int]]:
    """Return the answers with wrong tokens: each is right with a probability."""
    planted = {}
    for key, answer in answers.items():
        tokens = np.array(answer)
        is_right = random.random(len(answer)) < right
        planted[key] = np.where(is_right, tokens, np.abs(tokens - 1)).tolist()
    return planted
