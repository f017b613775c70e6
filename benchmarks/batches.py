"""`batches`: a backend on a GPU at every batch size, of a model's shape with random weights.

Decoding, steps with prompts and rows that decode, prompts, and many requests at once.

In: the assembly of a shape, a scratch folder with room for its weights. Out: a record, and its page. The record is
written after each part, so that a run that is cut short leaves one. Sizes that do not fit into the GPU's memory are
skipped, and listed with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import cold, options
from benchmarks.gpu import build_seconds, described, in_words, random_weights, record_path, timed
from benchmarks.markdown import paragraph, table
from benchmarks.measure import by_size, read_json, recorder, spread
from benchmarks.shapes import config_of
from lockstep import Advance, Assembly, CheckError, Engine, InputError, Model, Request, Sampling
from lockstep.step.logits_pipeline import Sampler

LIMITS = {"max_batch_size": 256, "max_num_tokens": 2048, "max_seq_len": 4096}
BATCHES = (1, 4, 16, 64, 128, 256)
ROWS = (15, 63, 255)
CHUNKS = (64, 128, 256, 512, 1024, 1792)
PROMPTS = (16, 64, 128, 256, 384, 512, 640, 1152, 2048)
SUMS = (1, 16, 64, 256, 512, 2048)  # tokens of an all-reduce
SUMS_IN_A_GRAPH = 64
CONTEXT = 512  # tokens before those that decode
WARM = 8  # steps that are not timed
STEPS = 64
MIXED_STEPS = 8
REQUESTS = 512
GROUP = 128  # columns of a weight that share a scale
PARTS = "decode", "sampled", "processed", "prompts", "mixed", "requests", "sampled_requests"
SAMPLED = Sampling(0.8, top_p=0.95)
PROCESSED = Sampling(0.8, top_p=0.95, repetition_penalty=1.1, logprobs=5)
SAMPLED_BATCHES = (1, 16, 64, 256)
OPTIONS = (
    options.option("--shape", "A shape that comes with the benchmark, or a config.json.", "llama-2-7b"),
    options.choice("--precision", "fp16", "bf16", "w8a16", "w4a16", "w8a8-fp8", help="Integers in groups of 128."),
    options.choice("--kv-cache-dtype", "fp16", "fp8", help="Of the backend cuda."),
    options.path("--vllm", "A record of vLLM on the same machine, to compare with.", metavar="FILE", exists=True),
    options.option("--layers", "The first layers of the shape alone.", None, int, minimum=1),
    options.option(
        "--part", "The measurements; may be given several times.", PARTS, name="parts", many=True, choices=PARTS
    ),
    options.number("--tensor-parallel", 1, "Ranks, one on each GPU; also times sums over them.", maximum=16),
    options.option("--alike", "All layers take the first one's weights, which lie on disk once.", False, bool),
    *options.ON_A_GPU,
)  # fmt: skip


def main(
    shape: str, precision: str, kv_cache_dtype: str, backend: str, work: Path,
    build_options: dict[str, Any], vllm: Path | None, layers: int | None, parts: Sequence[str],
    tensor_parallel: int, alike: bool, rounds: int, write: Path | None,
) -> None:  # fmt: skip
    """Measure one GPU at every batch size.

    Decoding, prompts meanwhile, and many requests at once. Sizes that do not fit are left out and named.
    """
    cold.ask("benchmarks.gpu:device", backend=backend)
    name = "batches"
    folder = work
    graphs_name = "graphs"
    cached = None
    if precision != "fp16":
        name += f"-{precision}"
        folder = work / precision
    if kv_cache_dtype != "fp16":
        name += f"-kv-{kv_cache_dtype}"
        graphs_name += f"-kv-{kv_cache_dtype}"
        cached = kv_cache_dtype
    if tensor_parallel > 1:
        name += f"-{tensor_parallel}"
    out = record_path(write, work, name, backend)
    folder = folder.absolute()
    graphs = folder / graphs_name
    config = read_json(config_of(shape))
    if layers is not None:
        config["num_hidden_layers"] = layers
    lockstep.export_config(config, precision, graphs, tensor_parallel, GROUP, kv_cache_dtype=cached)
    names = {"assembly": str(graphs / "assembly.json"), "work": str(folder), "out": str(out), "backend": backend}
    if vllm is not None:
        names["vllm"] = str(vllm.absolute())
    cold.ask(
        "benchmarks.batches:measure", **names, rounds=rounds, options=build_options, alike=alike,
        parts=list(parts),
    )  # fmt: skip
    out.with_suffix(".md").write_text(page(read_json(out)), encoding="utf-8")
    print(out)


def measure(assembly: str, work: str, out: str, **settings: Any) -> None:
    """`run` for `cold.ask`: arguments are JSON."""
    run(Path(assembly), Path(work), Path(out), **settings)


def run(
    assembly_json: Path,
    work: Path,
    out: Path,
    rounds: int = 3,
    backend: str = "cuda",
    options: Mapping[str, Any] | None = None,
    vllm: str | None = None,
    alike: bool = False,
    parts: Sequence[str] = PARTS,
) -> None:
    """Measure, and write the record.

    rounds: of each speed; the median counts. vllm: a record of vLLM on the same machine, which the record includes.
    alike: see `random_weights`.
    """
    assembly = Assembly.load(assembly_json)
    work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"benchmark": "batches", "layers": len(assembly.layers), "precision": assembly.precision}
    if assembly.kv_cache_dtype is not None:
        record["kv_cache_dtype"] = assembly.kv_cache_dtype
    if alike:
        record["weights"] = "of one layer, for all"

    note = recorder(out, record)
    weights = work / "weights" / "weights.json"
    if not weights.is_file():
        weights = random_weights(assembly, work / "weights", alike)
    engines = work / backend / "engines.json"
    note(build_seconds=build_seconds(assembly_json, engines, backend, {**LIMITS, **(options or {})}))
    note(**described(engines))
    model = Model.open(engines, assembly_json, weights)
    model.executor.runner.wait_for_weights()
    left_out: dict[str, str] = {}
    with unless_full(model, "warm-up", left_out, note):
        note(warm_up_seconds=round(timed(model.warm_up)[0], 2))
    if assembly.tensor_parallel is not None:
        note(ranks=assembly.tensor_parallel.degree, sums=sums(model))
    steps(model, rounds, note, left_out, parts)
    for name, sampling in (("requests", Sampling()), ("sampled_requests", SAMPLED)):
        if name not in parts:
            continue
        with unless_full(model, name, left_out, note):
            note(**{name: requests(model, sampling)})
    if vllm:
        note(vllm=of_vllm(read_json(Path(vllm))))


@contextlib.contextmanager
def unless_full(model: Model, part: str, left_out: dict[str, str], note: Callable[..., None]) -> Iterator[None]:
    """Skip the rest of the `with` block if the GPU has too little memory; print and note the reason."""
    try:
        yield
    except (InputError, CheckError) as error:
        if not re.search("KV cache|memory", str(error), re.IGNORECASE):
            raise
        release(model)
        left_out[part] = str(error)
        print(f"bench: {part} does not fit: {error}", file=sys.stderr, flush=True)
        note(left_out=left_out)


def steps(
    model: Model,
    rounds: int,
    note: Callable[..., None],
    left_out: dict[str, str] | None = None,
    parts: Sequence[str] = PARTS,
) -> None:
    """Measure steps of every kind and size for which the GPU has memory.

    note: called with the times of a kind after each size. left_out: gets {size that does not fit: reason}.
    """
    if left_out is None:
        left_out = {}
    kinds: dict[str, tuple[Sequence[int], Callable[[Model, int, int], dict[str, Any]]]] = {
        "decode": (BATCHES, decode),
        "sampled": (SAMPLED_BATCHES, functools.partial(sampled, sampling=SAMPLED)),
        "processed": (SAMPLED_BATCHES, functools.partial(sampled, sampling=PROCESSED)),
        "prompts": (PROMPTS, prompt),
    }
    for name, (sizes, measure_size) in kinds.items():
        if name not in parts:
            continue
        times: dict[str, Any] = {}
        for size in sizes:
            with unless_full(model, f"{name} {size}", left_out, note):
                times[str(size)] = measure_size(model, size, rounds)
            note(**{name: times})
    if "mixed" in parts:
        mixed_steps(model, rounds, note, left_out)


def mixed_steps(model: Model, rounds: int, note: Callable[..., None], left_out: dict[str, str]) -> None:
    """Measure steps with prompts and rows that decode; arguments: as of `steps`."""
    times_by_rows: dict[str, Any] = {}
    for rows in ROWS:
        for chunk in CHUNKS:
            part = f"mixed {rows}"
            if str(rows) in times_by_rows:
                part += f" from {chunk} tokens on"
            with unless_full(model, part, left_out, note):
                times = mixed(model, rows, rounds, [chunk])
                times_by_rows.setdefault(str(rows), {}).update(times)
            if part in left_out:  # longer chunks need more memory still
                break
        note(mixed=times_by_rows)


def sums(model: Model) -> dict[str, Any]:
    """Return the microseconds of a sum over the ranks of [tokens, hidden] fp16.

    Measured in graphs of SUMS_IN_A_GRAPH sums.
    """
    from benchmarks.step_timing import microseconds

    executor: Any = model.executor
    (hidden,) = {
        io.shape[1]
        for io in executor.ranks[0].network.exit.signature.inputs
        if io.name not in ("attention", "logit_rows")
    }
    sums_by_tokens = {}
    for tokens in SUMS:
        graphs = []
        for rank in executor.runner.on_each_device():
            values = rank.blocks.buffer("benchmark", (tokens, hidden), np.float16)
            with rank.stream.capture() as graph:
                for _ in range(SUMS_IN_A_GRAPH):
                    rank.exchange.sum(values)
            graphs.append(graph)
        times = [microseconds(executor.runner, graphs) / SUMS_IN_A_GRAPH for _ in range(5)]
        sums_by_tokens[str(tokens)] = {"hidden": hidden, "microseconds": spread(times, 2)}
    return sums_by_tokens


def begin(model: Model, rows: int) -> np.ndarray:
    """Run prompts of CONTEXT tokens in slots 0 to `rows`-1; return the next token of each slot.

    No two prompts are alike, so that their tokens choose different experts.
    """
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (rows, CONTEXT))
    next_tokens = np.zeros(model.max_batch_size, np.int64)
    at_once = max(1, min(4, model.max_num_tokens // CONTEXT))
    for first in range(0, rows, at_once):
        slots = range(first, min(rows, first + at_once))
        next_tokens[slots] = model.step_tokens([Advance(slot, prompts[slot], 0) for slot in slots])
    return next_tokens


def release(model: Model) -> None:
    for slot in range(model.max_batch_size):
        model.release(slot)


def decode(model: Model, batch: int, rounds: int) -> dict[str, Any]:
    """Time steps of `batch` requests after CONTEXT tokens, each launched before the tokens of the last are back."""
    seconds = [seconds_of_a_step(model, batch, Sampling()) for _ in range(rounds)]
    return {
        "milliseconds": spread([1e3 * value for value in seconds], 3),
        "tokens_per_second": round(batch / statistics.median(seconds), 1),
    }


def seconds_of_a_step(model: Model, batch: int, sampling: Sampling) -> float:
    """Return the mean seconds of STEPS steps after WARM; each request has another seed."""
    tokens = begin(model, batch)
    for slot in range(batch):
        model.set_sampling(slot, Sampler(dataclasses.replace(sampling, seed=slot)))
    for number in range(WARM + STEPS):
        if number == WARM:
            began = time.perf_counter()
        advances = [Advance(slot, tokens[slot : slot + 1], CONTEXT + number) for slot in range(batch)]
        tokens = model.step_tokens(advances, following=number < WARM + STEPS - 1)
    seconds = (time.perf_counter() - began) / STEPS
    release(model)
    return seconds


def sampled(model: Model, batch: int, rounds: int, sampling: Sampling) -> dict[str, Any]:
    """Time steps of requests with `sampling` and of greedy ones, in turn.

    of_greedy: the median of the rounds' ratios.
    """
    greedy = []
    drawn = []
    for _ in range(rounds):
        greedy.append(seconds_of_a_step(model, batch, Sampling()))
        drawn.append(seconds_of_a_step(model, batch, sampling))
    return {
        "milliseconds": spread([1e3 * seconds for seconds in drawn], 3),
        "greedy_milliseconds": spread([1e3 * seconds for seconds in greedy], 3),
        "of_greedy": round(statistics.median(a / b for a, b in zip(drawn, greedy, strict=True)), 3),
    }


def prompt(model: Model, tokens: int, rounds: int) -> dict[str, Any]:
    """Time one prompt alone."""
    ids = np.arange(tokens) % model.vocab_size
    times = [timed(lambda: model.step_tokens([Advance(0, ids, 0)]))[0] for _ in range(2 * rounds + 1)]
    release(model)
    return {"milliseconds": spread([1e3 * seconds for seconds in times[1:]], 2)}


def mixed(model: Model, rows: int, rounds: int, chunks: Sequence[int] = ()) -> dict[str, Any]:
    """Time steps with a prompt of each length in `chunks` (default: CHUNKS) and `rows` rows that decode.

    Rows decode after CONTEXT tokens. The prompt alone and the rows alone are timed too. host: the part of a step before
    the host waits for tokens.
    """
    by_chunk: dict[str, Any] = {}
    for chunk in chunks or CHUNKS:
        ids = np.arange(chunk) % model.vocab_size
        samples = []
        tokens = begin(model, rows)
        position = CONTEXT
        for number in range(2 + rounds * MIXED_STEPS):
            with waits() as waits_s:
                advances = [Advance(slot, tokens[slot : slot + 1], position) for slot in range(rows)]
                seconds, next_tokens = timed(
                    lambda: model.step_tokens([*advances, Advance(rows, ids, 0)], following=True)
                )
            tokens[:rows] = next_tokens[:rows]
            position += 1
            if number > 1:  # the first two warm up
                samples.append((seconds, seconds - sum(waits_s)))
        decode_seconds = []
        for number in range(2 + MIXED_STEPS):
            advances = [Advance(slot, tokens[slot : slot + 1], position) for slot in range(rows)]
            seconds, next_tokens = timed(lambda: model.step_tokens(advances, following=True))
            tokens[:rows] = next_tokens
            position += 1
            if number > 1:
                decode_seconds.append(seconds)
        release(model)
        decode_alone = 1e3 * statistics.median(decode_seconds)
        prompt_alone = prompt(model, chunk, 2)["milliseconds"]["median"]
        median = statistics.median(seconds for seconds, _ in samples)
        by_chunk[str(chunk)] = {
            "milliseconds": spread([1e3 * seconds for seconds, _ in samples], 2),
            "host_milliseconds": spread([1e3 * host for _, host in samples], 2),
            "decode_alone": round(decode_alone, 2),
            "prompt_alone": round(prompt_alone, 2),
            "of_parts": round(1e3 * median / (decode_alone + prompt_alone), 3),
        }
    return by_chunk


@contextlib.contextmanager
def waits() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each wait for the device within the `with` block."""
    from lockstep_gpu import cuda

    waited: list[float] = []
    wait = cuda.Event.wait

    def timed_wait(event: cuda.Event) -> None:
        waited.append(timed(lambda: wait(event))[0])

    cuda.Event.wait = timed_wait  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        cuda.Event.wait = wait  # type: ignore[method-assign]


def lengths() -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the prompts of REQUESTS requests, and their new ones.

    Both are normal, as in a load of chats.
    """
    random = np.random.default_rng(0)
    prompts = np.clip(np.rint(random.normal(512, 128, REQUESTS)), 16, 2048).astype(int)
    return prompts, np.clip(np.rint(random.normal(128, 32, REQUESTS)), 8, 512).astype(int)


def requests(model: Model, sampling: Sampling = Sampling()) -> dict[str, Any]:
    """Time REQUESTS requests at once, twice; the better counts. Each request has another seed."""
    random = np.random.default_rng(0)
    runs = []
    prompts, new = lengths()
    timed_requests = [
        Request(
            random.integers(3, model.vocab_size, count),
            int(max_tokens),
            sampling=dataclasses.replace(sampling, seed=number),
        )
        for number, (count, max_tokens) in enumerate(zip(prompts, new))
    ]
    for _ in range(2):
        seconds, num_tokens = timed(lambda: sum(1 for _ in Engine(model, prefix_caching=False).run(timed_requests)))
        runs.append(seconds)
    return {
        "requests": REQUESTS,
        "prompt_tokens": int(prompts.sum()),
        "new_tokens": num_tokens,
        "seconds": [round(seconds, 2) for seconds in runs],
        "new_tokens_per_second": round(num_tokens / min(runs), 1),
    }


def of_vllm(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the version and the numbers of a record of vLLM."""
    prompt_ms = None
    if "prefill" in full:
        prompt_ms = round(1e3 * full["prefill"]["median_s"], 2)
    return {
        "version": full["versions"]["vllm"],
        "decode": {str(row["batch"]): round(row["tokens_per_s"], 1) for row in full.get("decode", ())},
        "prompt_2048": prompt_ms,
        "requests": [round(seconds, 2) for seconds in full.get("throughput", {}).get("runs_s", ())],
    }


def page(record: Mapping[str, Any]) -> str:
    """Return the record as Markdown."""
    title = "TensorRT"
    if record.get("backend") == "cuda":
        title = "CUDA"
    lines = [
        f"# {title} at every batch size",
        "",
        _setup(record),
        "",
        _startup(record),
        *_decode_lines(record),
        *_sampled_lines(record),
        *_sums_lines(record),
        *_prompt_lines(record),
        *_mixed_lines(record),
    ]
    if left_out := record.get("left_out"):
        lines += ["", paragraph(f"Without room in this GPU's memory, and not measured: {', '.join(left_out)}.")]
    return "\n".join([*lines, *_load_lines(record)]) + "\n"


def _setup(record: Mapping[str, Any]) -> str:
    """Return the subject, the machine and the command."""
    command = "python -m benchmarks batches --work FOLDER --write records"
    if "ranks" in record:
        command += f" --tensor-parallel {record['ranks']}"
    if record["precision"] != "fp16":
        command += f" --precision {record['precision']}"
    if "kv_cache_dtype" in record:
        command += f" --kv-cache-dtype {record['kv_cache_dtype']}"
    if record.get("backend") == "tensorrt":
        command += " --backend tensorrt"
    return paragraph(
        f"{record['layers']} layers, {record['precision']}, random weights, on {record.get('ranks', 'one')} "
        f"{record['device']['name']} with {in_words(record)}. Made by `{command}`."
    )


def _startup(record: Mapping[str, Any]) -> str:
    line = f"Engines for {record['options']['max_batch_size']} rows are built in {record['build_seconds']} s"
    if "warm_up_seconds" in record:
        line += f"; warm-up takes {record['warm_up_seconds']} s"
    return f"{line}."


def _decode_lines(record: Mapping[str, Any]) -> list[str]:
    vllm = record.get("vllm")
    headings = ["batch", "ms a step", "Lockstep"]
    if vllm:
        headings += [f"vLLM {vllm['version']}", "ratio"]
    rows = []
    for batch, times in by_size(record.get("decode", {})):
        speed = times["tokens_per_second"]
        row = [batch, times["milliseconds"]["median"], speed]
        if vllm and batch in vllm["decode"]:
            row += [vllm["decode"][batch], round(speed / vllm["decode"][batch], 3)]
        rows.append(row)
    lines = ["", f"Decoding after {CONTEXT} tokens, tokens a second:", "", *table(headings, rows)]
    if vllm and "another_run" in vllm:
        lines += ["", "vLLM ran on another day, on another machine of this kind."]
    return lines


def _sampled_lines(record: Mapping[str, Any]) -> list[str]:
    """Return a table for each kind of sampling; none for a record of before the device sampled."""
    lines = []
    parameters = f"temperature {SAMPLED.temperature}, top-p {SAMPLED.top_p}"
    processing = (
        f"{parameters}, repetition penalty {PROCESSED.repetition_penalty}, {PROCESSED.logprobs} log-probabilities"
    )
    for name, description in (("sampled", parameters), ("processed", processing)):
        if name in record:
            rows = [
                [batch, times["greedy_milliseconds"]["median"], times["milliseconds"]["median"], times["of_greedy"]]
                for batch, times in by_size(record[name])
            ]
            headings = ["batch", "greedy, ms", "sampled, ms", "ratio"]
            lines += ["", f"Sampled ({description}) and greedy, in turn:", "", *table(headings, rows)]
    return lines


def _sums_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the table of all-reduces; none for one rank."""
    if "sums" not in record:
        return []
    rows = [[f"{tokens} x {row['hidden']}", row["microseconds"]["median"]] for tokens, row in by_size(record["sums"])]
    return ["", "An all-reduce over the ranks:", "", *table(["tokens x hidden", "microseconds"], rows)]


def _prompt_lines(record: Mapping[str, Any]) -> list[str]:
    if "prompts" not in record:
        return []
    times = [f"{tokens} tokens {times['milliseconds']['median']}" for tokens, times in by_size(record["prompts"])]
    line = f"A prompt alone, milliseconds: {', '.join(times)}"
    vllm = record.get("vllm")
    if vllm and vllm["prompt_2048"]:
        line += f" (vLLM: 2048 tokens {vllm['prompt_2048']})"
    return ["", f"{line}."]


def _mixed_lines(record: Mapping[str, Any]) -> list[str]:
    if "mixed" not in record:
        return []
    rows = []
    for num_rows, times_by_chunk in by_size(record["mixed"]):
        for chunk, times in by_size(times_by_chunk):
            step = times["milliseconds"]["median"]
            host = times["host_milliseconds"]["median"]
            rows.append([num_rows, chunk, step, times["decode_alone"], times["prompt_alone"], times["of_parts"], host])
    headings = ["rows", "prompt tokens", "step", "decoding alone", "prompt alone", "step of parts", "host"]
    caption = (
        "A step with prompt tokens and rows that decode, milliseconds; parts: both alone, one after the other; host: "
        "before it waits for the device:"
    )
    return ["", paragraph(caption), "", *table(headings, rows)]


def _load_lines(record: Mapping[str, Any]) -> list[str]:
    load = record.get("requests")
    if not load:
        return []
    line = (
        f"{load['requests']} requests at once, {load['prompt_tokens']} prompt tokens and {load['new_tokens']} "
        f"new ones: {min(load['seconds'])} s"
    )
    if vllm := record.get("vllm"):
        line += f", vLLM {min(vllm['requests'])} s"
    if sampled_load := record.get("sampled_requests"):
        line += f"; sampled {min(sampled_load['seconds'])} s"
    return ["", f"{line}."]
