"""`invariance`: whether a request's logits have the same bits in any batch.

Requests of all lengths around the places where something changes (pages, chunks, sizes that kernels are made for) run
alone, and then in random schedules: many at once, that come at random steps, with random room in a step (other cuts of
prompts), on prefixes that others left, half of them with drafts of which each third token is wrong. Each position's
logits are compared with those of the request alone, bit by bit.

In: models, each in a precision: shapes, which get random weights, and those of a results tree. Out: one record, with a
row for each. A run that was cut short is resumed: a row of the same code, device and libraries goes on after its last
schedule, in a new process, whose requests alone must give the same bits too.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import cold, options
from benchmarks.gpu import build_seconds, described, random_weights, record_path
from benchmarks.measure import read_json, write_json
from benchmarks.shapes import config_of
from lockstep import Assembly, CheckError, Engine, InputError, Model, ModelOptions, Request, Results, Speculation
from lockstep.artifacts.files import sha256_json
from lockstep.backends.base import get_backend
from lockstep.provenance.code_identity import code_digests
from lockstep.verify.golden.drafted import RecordedDrafter

LIMITS = {"max_batch_size": 256, "max_num_tokens": 2048, "max_seq_len": 4096}
EDGES = (1, 16, 32, 64, 128, 192, 256, 320, 448, 512, 640, 1024, 1536)  # and one less and one more
NEW = 32  # tokens of an answer
MODELS = ("smollm2/fp16", "gemma-3-270m/bf16", "llama-3.1-8b/fp16", "qwen3-30b-a3b/fp16")
OPTIONS = (
    options.option("models", many=True, metavar="[MODEL/PRECISION]..."),
    options.number("--positions", 250_000, "Positions of each model to compare.", maximum=10_000_000),
    options.number("--seconds", 36_000, "No schedule begins later; the same command goes on there."),
    options.number("--layers", None, "The first layers of a shape alone.", maximum=200),
    options.number("--tensor-parallel", 1, "Ranks of a shape, one on each GPU.", maximum=16),
    options.option("--alike", "All layers of a shape take the first one's weights.", False, bool),
    options.RESULTS,
    options.choice("--backend", "cuda", "tensorrt", "onnxruntime", "openvino"),
    *options.ON_A_GPU[1:-1],
)  # fmt: skip


def main(
    models: Sequence[str], positions: int, seconds: int, layers: int | None, tensor_parallel: int, alike: bool,
    results: Path, backend: str, work: Path, build_options: dict[str, Any], write: Path | None,
) -> None:  # fmt: skip
    """Compare a request's logits alone with those in batches, bit by bit.

    MODEL is a shape, or a model of a results tree.  [default: smollm2 and gemma-3-270m of `results`, and the shapes
    llama-3.1-8b and qwen3-30b-a3b]
    """
    deadline = time.time() + seconds
    cold.ask("benchmarks.gpu:device", backend=backend)
    out = record_path(write, work, "invariance-models", backend)
    code = sha256_json(code_digests("cli.main"))[:12]
    suffix = ""
    if layers is not None:
        suffix += f"/{layers} layers"
    if tensor_parallel > 1:
        suffix += f"/{tensor_parallel} ranks"
    rows = {}
    for model in models or MODELS:
        name, _, precision = model.rpartition("/")
        rows[f"{Path(name).name.removesuffix('.json')}/{precision}{suffix}"] = model
    for name, model in rows.items():
        row = _read(out)["models"].get(name, {})
        if row.get("code") != code:
            row = {"code": code}
        if row.get("positions", 0) >= positions:
            continue
        if time.time() >= deadline:
            break
        folder = work.absolute() / code / name.replace("/", "-")
        paths = _files(model, results, folder, layers, tensor_parallel, alike)
        cold.ask(
            "benchmarks.invariance:measure", name=name, row=row, **paths, folder=str(folder), out=str(out),
            backend=backend, options=build_options, positions=positions, deadline=deadline,
        )  # fmt: skip
    record = _read(out)
    for name in rows:
        compared_positions = record["models"].get(name, {}).get("positions", 0)
        if compared_positions < positions:
            print(f"bench: {name}: {compared_positions} of {positions} positions; run it again", file=sys.stderr)
    print(out)
    for name, row in record["models"].items():
        if row["differing"] or len(row["digests"]) > 1:
            raise CheckError(
                f"{out}: {name}: expected the same bits in any batch and any process, found {row['differing']} "
                f"positions that differ, and {len(row['digests'])} digests of the requests alone"
            )


def _read(out: Path) -> dict[str, Any]:
    return read_json(out) if out.is_file() else {"benchmark": "invariance", "models": {}}


def _files(
    name: str, results: Path, folder: Path, layers: int | None, tensor_parallel: int, alike: bool
) -> dict[str, str]:
    """Return the paths of the assembly and weights of MODEL/PRECISION, which are made in `folder` for a shape."""
    model, _, precision = name.rpartition("/")
    assembly = Results(results).assembly(model, precision)
    if assembly.is_file():
        weights = Results(results).weights(model, precision)
        return {"assembly": str(assembly.absolute()), "weights": str(weights.absolute()), "kind": "of a checkpoint"}
    if not config_of(model).is_file():
        raise InputError(
            f"{name}: expected MODEL/PRECISION of a shape in benchmarks/shapes, or of a model that {results} has "
            "graphs of, found neither; run the model's workflow first"
        )
    assembly = folder / "graphs" / "assembly.json"
    if not assembly.is_file():
        config = read_json(config_of(model))
        if layers is not None:
            config["num_hidden_layers"] = layers
        lockstep.export_config(config, precision, assembly.parent, tensor_parallel, 128)
    weights = folder / "weights" / "weights.json"
    if not weights.is_file():
        random_weights(Assembly.load(assembly), weights.parent, alike)
    kind = "random, of one layer for all" if alike else "random"
    return {"assembly": str(assembly), "weights": str(weights), "kind": kind}


def measure(
    name: str, row: dict[str, Any], assembly: str, weights: str, kind: str, folder: str, out: str,
    backend: str, options: dict[str, Any], positions: int, deadline: float,
) -> None:  # fmt: skip
    """Build, open, compare, and write the model's row after each schedule."""
    began = time.time()
    engines = Path(folder) / backend / "engines.json"
    opened = Assembly.load(assembly)
    limits = dict(LIMITS)
    limits["max_seq_len"] = min(limits["max_seq_len"], opened.max_position_embeddings or limits["max_seq_len"])
    takes = get_backend(backend).default_options()
    build_options = {key: limit for key, limit in limits.items() if key in takes} | options
    build_seconds(Path(assembly), engines, backend, build_options)
    about = {"precision": opened.precision, "layers": len(opened.layers), "weights": kind, **described(engines)}
    if {key: row.get(key) for key in about} != about:
        row = {"code": row["code"], **about}
    earlier_seconds = row.get("seconds", 0)
    model = Model.open(engines, assembly, weights, options=ModelOptions(**limits))
    model.warm_up()

    def note() -> None:
        row["seconds"] = round(earlier_seconds + time.time() - began)
        record = _read(Path(out))
        record["models"][name] = row
        for total in ("positions", "differing"):
            record[total] = sum(counted[total] for counted in record["models"].values())
        write_json(Path(out), record)

    compare(model, row, positions, deadline, note)
    print(f"bench: {name}: {row['positions']} positions, {row['differing']} differ", file=sys.stderr)


def compare(model: Model, row: dict[str, Any], positions: int, deadline: float, note: Callable[[], None]) -> None:
    """Compare positions until `row` has `positions`, or until the deadline (seconds since 1970).

    Half of the requests ask for logits, whose bits are compared; the tokens of the others, which the device chooses.

    row: what earlier processes counted, which is changed; digests: of all that requests give alone, one by process that
    had another than those before. note: is called after each schedule.
    """
    prompts = _prompts(model)
    alone = list[Answer]()
    for number, prompt in enumerate(prompts):
        alone += answers(model, [(0, prompt)], number % 2 == 1, None, False)
    digest = _digest(alone)
    row.setdefault("digests", [])
    if digest not in row["digests"]:
        row["digests"].append(digest)
    for counter in ("positions", "differing", "schedules"):
        row.setdefault(counter, 0)
    row.setdefault("first", [])
    note()
    while row["positions"] < positions and time.time() < deadline:
        _run_schedule(model, row, prompts, alone)
        row["schedules"] += 1
        note()


def _prompts(model: Model) -> list[np.ndarray]:
    """Return the prompts, of all lengths, with prefixes that others have too."""
    random = np.random.default_rng(0)
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
    return prompts


def _run_schedule(model: Model, row: dict[str, Any], prompts: Sequence[np.ndarray], alone: Sequence[Answer]) -> None:
    """Run the random schedule that is next in the row, and count."""
    random = np.random.default_rng([1, row["schedules"]])
    count = int(random.choice([1, 2, 5, 16, 17, 44, 45, 64, 100, 200, model.max_batch_size]))
    if count < 100:
        count = min(count, len(prompts))
    chosen = random.choice(len(prompts), count)
    # With less room an engine has smaller chunks, on which a CPU's bits depend.
    smallest = model.max_batch_size + model.chunk_size
    room = min(int(random.choice([smallest, max(smallest, 700), model.max_num_tokens])), model.max_num_tokens)
    arrivals = np.sort(random.integers(0, 1 + int(random.choice([0, 4, 64])), len(chosen)))
    for parity in (0, 1):
        numbers = [number for number in chosen if number % 2 == parity]
        if not numbers:
            continue
        schedule = [(int(step), prompts[number]) for step, number in zip(arrivals, numbers)]
        expected = [alone[number] for number in numbers]
        recorded = None
        if row["schedules"] % 2:
            recorded = [_tokens(answer) for answer in expected]
        for number, answer in zip(numbers, answers(model, schedule, parity == 1, room, True, recorded, expected)):
            wrong = [position for position, (_, is_same) in enumerate(answer) if is_same is False]
            missing = max(0, len(alone[number]) - len(answer))  # an answer that ended too early
            row["positions"] += len(answer)
            row["differing"] += len(wrong) + missing
            if (wrong or missing) and len(row["first"]) < 20:
                case = {"prompt": len(prompts[number]), "position": (*wrong, len(answer))[0], "requests": len(numbers)}
                row["first"].append({**case, "room": room, "schedule": row["schedules"]})


# By position: the token, and the logits [vocab_size] float32 if the request gets them, or whether both are as expected.
Answer = list[tuple[int, Any]]


def _tokens(answer: Answer) -> list[int]:
    return [token for token, _ in answer]


def _digest(alone: Sequence[Answer]) -> str:
    digest = hashlib.sha256()
    for answer in alone:
        for token, logits in answer:
            digest.update(token.to_bytes(4, "little"))
            if logits is not None:
                digest.update(logits)
    return digest.hexdigest()


def answers(
    model: Model,
    schedule: Sequence[tuple[int, np.ndarray]],
    asks_logits: bool,
    room: int | None,
    prefix_caching: bool,
    recorded: Sequence[list[int]] | None = None,
    expected: Sequence[Answer] | None = None,
) -> list[Answer]:
    """Return the answers by request: compared with those expected, or with their logits.

    schedule: (step of arrival, prompt). room: tokens of a step. recorded: answers, which are drafted with errors.
    """
    drafts = RecordedDrafter({(index, 0): answer for index, answer in enumerate(recorded or ())}, 3)
    speculation = Speculation(drafts, 4) if recorded and model.verifies_drafts else None
    engine = Engine(model, max_num_tokens=room, prefix_caching=prefix_caching, speculation=speculation)
    by_request: list[Answer] = [[] for _ in schedule]

    def note(number: int, token: int, logits: np.ndarray | None) -> None:
        answer = by_request[number]
        if expected is None:
            answer.append((token, None if logits is None else logits.copy()))
        else:
            answer.append((token, _is_same(expected[number], len(answer), token, logits)))

    def request(number: int) -> Request:
        if not asks_logits:
            return Request(schedule[number][1], NEW)

        def choose(logits: np.ndarray) -> int:
            token = int(logits.argmax())
            note(number, token, logits)
            return token

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
                if not asks_logits:
                    note(owner[token.request], token.token, None)
            steps += 1
    finally:
        engine.close()
    return by_request


def _is_same(expected: Answer, position: int, token: int, logits: np.ndarray | None) -> bool:
    if position >= len(expected) or token != expected[position][0]:
        return False
    return logits is None or bool(np.array_equal(logits.view(np.uint32), expected[position][1].view(np.uint32)))
