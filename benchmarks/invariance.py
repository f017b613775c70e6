"""`invariance`: whether a request's logits have the same bits in any batch.

Requests of all lengths around the places where something changes (pages, chunks, sizes that kernels are made for) run
alone, and then in random schedules: many at once, that come at random steps, with random room in a step (other cuts of
prompts), on prefixes that others left, half of them with drafts of which each third token is wrong. Each position's
logits are compared with those of the request alone, bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import cold, options
from benchmarks.gpu import described, open_random, record_path
from benchmarks.measure import read_json, recorder
from benchmarks.shapes import config_of
from lockstep import Assembly, Engine, Model, Request, Speculation
from lockstep.verify.golden.drafted import RecordedDrafter

LIMITS = {"max_batch_size": 256, "max_num_tokens": 2048, "max_seq_len": 4096}
EDGES = (1, 16, 32, 64, 128, 192, 256, 320, 448, 512, 640, 1024, 1536)  # and one less and one more
NEW = 32  # tokens of an answer
OPTIONS = (
    options.Option("--shape", "A shape that comes with the benchmark, or a config.json.", "llama-2-7b"),
    options.choice("--precision", "fp16", "bf16", "w8a16", "w4a16", help="Small weights in groups of 128."),
    options.number("--positions", 100_000, "Positions to compare.", maximum=10_000_000),
    options.number("--layers", 4, "Layers of the shape.", maximum=200),
    options.number("--tensor-parallel", 1, "Ranks, one on each GPU.", maximum=16),
    *options.ON_A_GPU[:-1],
)  # fmt: skip


def main(
    shape: str, precision: str, positions: int, layers: int, tensor_parallel: int, backend: str,
    work: Path, build_options: dict[str, Any], write: Path | None,
) -> None:  # fmt: skip
    """Compare a request's logits alone with those in batches, bit by bit."""
    cold.ask("benchmarks.gpu:device", backend=backend)
    name = "invariance"
    if precision != "fp16":
        name += f"-{precision}"
    if tensor_parallel > 1:
        name += f"-{tensor_parallel}"
    out = record_path(write, work, name, backend)
    config = read_json(config_of(shape)) | {"num_hidden_layers": layers}
    lockstep.export_config(config, precision, work / "graphs", tensor_parallel, 128)
    names = {"assembly": str(work / "graphs" / "assembly.json"), "work": str(work), "out": str(out)}
    cold.ask("benchmarks.invariance:measure", **names, backend=backend, options=build_options, positions=positions)
    print(out)


def measure(assembly: str, work: str, out: str, backend: str, options: dict[str, Any], positions: int) -> None:
    """Build, open, compare, and write the record."""
    opened = Assembly.load(assembly)
    note = recorder(Path(out), {"benchmark": "invariance", "layers": len(opened.layers)})
    model = open_random(assembly, Path(work), backend, {**LIMITS, **options})
    note(precision=opened.precision, **described(model.engines.path))
    note(**compared(model, positions))


def compared(model: Model, positions: int, seed: int = 0) -> dict[str, Any]:
    """Return how many positions were compared, and those that differ; digest: of all that requests give alone.

    Half of the requests ask for logits, whose bits are compared; the tokens of the others, which the device chooses.
    """
    random = np.random.default_rng(seed)
    longest = min(model.max_seq_len - NEW, max(EDGES) + 1)
    lengths = set[int]()
    for edge in EDGES:
        lengths.update(min(length, longest) for length in (edge - 1, edge, edge + 1) if length > 0)
    shared = random.integers(0, model.vocab_size, longest)
    prompts = []
    for length in sorted(lengths):
        for common in (0, length // 2, length - 1):  # tokens of a prefix that other prompts have too
            private = random.integers(0, model.vocab_size, length - common)
            prompts.append(np.concatenate([shared[:common], private]))
    alone = [answers(model, [(0, prompt)], number % 2, None, False)[0] for number, prompt in enumerate(prompts)]
    tried = 0
    differing = 0
    where = list[dict[str, Any]]()
    schedules = 0
    while tried < positions:
        count = int(random.choice([1, 2, 5, 16, 17, 44, 45, 64, 100, 200, model.max_batch_size]))
        if count < 100:
            count = min(count, len(prompts))
        chosen = random.choice(len(prompts), count)
        room = int(random.choice([model.max_batch_size + 64, 700, model.max_num_tokens]))
        arrivals = np.sort(random.integers(0, 1 + int(random.choice([0, 4, 64])), len(chosen)))
        for parity in (0, 1):
            numbers = [number for number in chosen if number % 2 == parity]
            if not numbers:
                continue
            schedule = [(int(step), prompts[number]) for step, number in zip(arrivals, numbers)]
            recorded = None
            if schedules % 2:
                recorded = [_tokens(alone[number]) for number in numbers]
            for number, answer in zip(numbers, answers(model, schedule, parity, room, True, recorded)):
                wrong = [place for place, (a, b) in enumerate(zip(alone[number], answer, strict=True)) if a != b]
                tried += len(answer)
                differing += len(wrong)
                if wrong and len(where) < 20:
                    case = {"prompt": len(prompts[number]), "position": wrong[0], "requests": len(numbers)}
                    where.append({**case, "room": room})
        schedules += 1
    digest = hashlib.sha256(repr(alone).encode()).hexdigest()
    return {"positions": tried, "differing": differing, "schedules": schedules, "first": where, "digest": digest}


def _tokens(answer: Sequence[tuple[int, str]]) -> list[int]:
    return [token for token, _ in answer]


def answers(
    model: Model,
    schedule: Sequence[tuple[int, np.ndarray]],
    logits: int,
    room: int | None,
    prefix_caching: bool,
    recorded: Sequence[list[int]] | None = None,
) -> list[list[tuple[int, str]]]:
    """Return by request, for each position, its token, and a digest of its logits where it asks for them.

    schedule: (step of arrival, prompt). room: tokens of a step. recorded: answers, which are drafted with errors.
    """
    drafts = RecordedDrafter({(index, 0): answer for index, answer in enumerate(recorded or ())}, 3)
    speculation = Speculation(drafts, 4) if recorded and model.verifies_drafts else None
    engine = Engine(model, max_num_tokens=room, prefix_caching=prefix_caching, speculation=speculation)
    by_request: list[list[tuple[int, str]]] = [[] for _ in schedule]

    def request(number: int) -> Request:
        if not logits:
            return Request(schedule[number][1], NEW)

        def choose(row: np.ndarray) -> int:
            by_request[number].append((int(row.argmax()), hashlib.sha256(row.tobytes()).hexdigest()))
            return by_request[number][-1][0]

        return Request(schedule[number][1], NEW, choose=choose)

    owner = dict[int, int]()
    at = 0
    steps = 0
    try:
        while at < len(schedule) or engine.has_work:
            while at < len(schedule) and (schedule[at][0] <= steps or not engine.has_work):
                owner[engine.add(request(at))] = at
                at += 1
            for token in engine.step():
                if not logits:
                    by_request[owner[token.request]].append((token.token, ""))
            steps += 1
    finally:
        engine.close()
    return by_request
