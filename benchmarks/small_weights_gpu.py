"""Small weights on a GPU: fp16, w8a16 and w4a16 of a model's shape, in one run.

One after the other.

In: folders with the assembly of the shape in each precision, a scratch folder. Out: a record; in the scratch folder
each precision has one of its own, written after each part. All layers take one layer's random numbers, each from
memory of its own.

    python -m benchmarks.small_weights_gpu GRAPHS WORK OUT.json [PRECISION ...]
    python -m benchmarks.small_weights_gpu --products OUT.json

where GRAPHS/<precision>/assembly.json was made by `--graphs-only GRAPHS`, which needs torch. The second times a layer's
products alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import described, random_weights, timed
from benchmarks.measure import read_json, recorder, spread, write_json
from lockstep import Advance, Assembly, Model
from lockstep.backends.builder import build

PRECISIONS = ("fp16", "w8a16", "w4a16")
SHAPE, GROUP = "llama-2-7b", 128
LIMITS = {"max_batch_size": 16, "max_num_tokens": 2048, "max_seq_len": 2048}
BATCHES, PROMPTS, PARTS_OF = (1, 4, 8, 16), (512, 2048), (1, 8, 16)
CONTEXT, WARM, STEPS, ROUNDS = 512, 8, 64, 3
PRODUCTS = (((4096,) * 3, 4096), ((4096,), 4096), ((11008,) * 2, 4096), ((4096,), 11008))  # of a layer
ROWS, LAYERS = (1, 8, 16, 24, 32, 64, 512, 2048), 4
_SECONDS = 110  # of a precision: what is under way then is ended, and what was written stays


def graphs(folder: Path) -> None:
    """Export the shape in all precisions. Needs torch."""
    from benchmarks.export import SHAPES
    from lockstep import export_config

    for precision in PRECISIONS:
        export_config(read_json(SHAPES / f"{SHAPE}.json"), precision, folder / precision, group_size=GROUP)


def run(folder: Path, work: Path, out: Path, precisions: tuple[str, ...] = PRECISIONS) -> None:
    """Measure each precision in a process of its own, and write the record.

    `failed` has those that ended early, with their exit code.
    """
    record: dict[str, Any] = {"benchmark": "small-weights-gpu", "shape": SHAPE, "group_size": GROUP, "failed": {}}
    for precision in precisions:
        own = work / f"{precision}.json"
        command = [sys.executable, "-m", "benchmarks.small_weights_gpu", "--one", str(folder), str(work), precision]
        try:
            code: int | str = subprocess.run(command, timeout=_SECONDS).returncode
        except subprocess.TimeoutExpired:
            code = f"ended after {_SECONDS} s"
        if code:
            record["failed"][precision] = code
        if own.is_file():
            record[precision] = read_json(own)
        record["times_as_fast_as_fp16"] = {each: _times(record, each) for each in precisions if each in record}
        write_json(out, record)


def _times(record: dict[str, Any], precision: str) -> dict[str, float]:
    full, mine = (record.get(each, {}).get("decode", {}) for each in ("fp16", precision))
    return {batch: round(full[batch]["median"] / mine[batch]["median"], 2) for batch in mine if batch in full}


def measure(folder: Path, work: Path, precision: str) -> None:
    """Measure one precision."""
    assembly_json, own = folder / precision / "assembly.json", work / precision
    assembly, note = Assembly.load(assembly_json), recorder(work / f"{precision}.json", {})
    own.mkdir(parents=True, exist_ok=True)
    weights = random_weights(assembly, own / "weights", alike=True)
    seconds, engines = timed(lambda: build(assembly_json, "cuda", own / "engines.json", LIMITS))
    sizes = [(own / entry["file"]).stat().st_size for entry in read_json(engines)["engines"].values()]
    note(build_seconds=round(seconds, 1), engine_bytes=sum(sizes), layers=len(assembly.layers), **described(engines))
    seconds, model = timed(lambda: Model.open(engines, assembly_json, weights))
    more, _ = timed(model._executor.group.wait_for_weights)
    from lockstep.gpu import cuda

    note(open_seconds=round(seconds + more, 1), weight_bytes=_weight_bytes(assembly), used_bytes=cuda.memory_used())
    note(decode={str(batch): spread([_decode(model, batch) for _ in range(ROUNDS)], 3) for batch in BATCHES})
    note(prompt={str(tokens): spread(_prompt(model, tokens), 2) for tokens in PROMPTS})
    note(microseconds={str(batch): _parts(model, batch) for batch in PARTS_OF})


def products(out: Path) -> None:
    """Measure a layer's four products in microseconds, by number of rows.

    By the kernel and by cuBLAS, a small weight made fp16 before, for each form of weights. Each of LAYERS layers has
    weights of its own.
    """
    from lockstep.gpu import cuda
    from lockstep.gpu.kernels import products as of

    stream, random, found = cuda.Stream(), np.random.default_rng(0), dict[str, dict[str, dict[str, float]]]()
    multiply = of.Products(stream)
    most, ways = dict(of.MOST_ROWS), {"kernel": 1 << 30, "cuBLAS": 0}
    pool = random.integers(0, 256, 1 << 28, np.uint8)
    for bits in (16, 8, 4):
        group, layers = (0 if bits == 16 else GROUP), []
        for _ in range(LAYERS):
            layer = []
            for outs, columns in PRODUCTS:
                total = sum(outs)
                nbytes = total * columns * bits // 8
                data = cuda.zeros((total, columns), "f2") if bits == 16 else cuda.empty((nbytes,), "u1")
                if bits < 16:
                    stream.upload(data, np.resize(pool, nbytes))
                scales = cuda.zeros((total, columns // GROUP), "f2")
                layer.append(of.SmallWeight(data, scales, bits, group, columns, outs))
            layers.append(layer)
        stream.synchronize()
        for way, rows_of_kernel in ways.items():
            of.MOST_ROWS.update(dict.fromkeys(most, rows_of_kernel))
            for rows in ROWS:
                if way == "kernel" and rows > 32:
                    continue
                xs = [cuda.zeros((rows, columns), "f2") for _, columns in PRODUCTS]
                ys = [[cuda.empty((rows, size), "f2") for size in outs] for outs, _ in PRODUCTS]
                calls = [multiply.bind(*each) for layer in layers for each in zip(layer, xs, ys)]

                def step() -> None:
                    for call in calls:  # noqa: B023
                        call(rows)  # noqa: B023

                step()
                with stream.capture() as graph:
                    step()
                times = []
                for _ in range(6):
                    before, after = cuda.Event(), cuda.Event()
                    before.record(stream)
                    graph.launch(stream)
                    after.record(stream)
                    after.wait()
                    times.append(after.milliseconds_since(before) * 1e3 / LAYERS)
                kind = found.setdefault(f"{bits} bits", {}).setdefault(way, {})
                kind[str(rows)] = round(sorted(times)[2], 1)
        write_json(out, {"benchmark": "small-weights-products", "microseconds_of_a_layer": found})
        print(f"bench: products: {bits} bits: {found[f'{bits} bits']}", file=sys.stderr, flush=True)
    of.MOST_ROWS.update(most)


def _weight_bytes(assembly: Assembly) -> int:
    """Of all weights as the checkpoint has them; each layer its own."""
    parts = [assembly.embedding, *(layer.block for layer in assembly.layers), assembly.layers[-1].exit]
    slots = {part.slots[slot.name][0]: slot for part in parts for slot in assembly.classes[part.graph].signature.slots}
    return sum(int(np.prod(slot.sizes)) * slot.numpy_dtype.itemsize for slot in slots.values())


def _begin(model: Model, batch: int) -> np.ndarray:
    given = np.arange(CONTEXT) % model.vocab_size
    return np.concatenate([model.step_tokens([Advance(slot, given, 0)]) for slot in range(batch)])


def _release(model: Model) -> None:
    for slot in range(model.max_batch_size):
        model.release(slot)


def _decode(model: Model, batch: int) -> float:
    """Milliseconds of a step of `batch` requests behind CONTEXT tokens."""
    tokens = _begin(model, batch)
    for number in range(WARM + STEPS):
        if number == WARM:
            began = time.perf_counter()
        advances = [Advance(slot, tokens[slot : slot + 1], CONTEXT + number) for slot in range(batch)]
        tokens = model.step_tokens(advances, following=number < WARM + STEPS - 1)
    milliseconds = (time.perf_counter() - began) * 1e3 / STEPS
    _release(model)
    return milliseconds


def _parts(model: Model, batch: int) -> dict[str, float]:
    _begin(model, batch)
    found: dict[str, float] = model._executor.breakdown(batch)
    _release(model)
    return found


def _prompt(model: Model, tokens: int) -> list[float]:
    """Milliseconds of a prompt alone."""
    given = np.arange(tokens) % model.vocab_size
    found = [timed(lambda: model.step_tokens([Advance(0, given, 0)]))[0] * 1e3 for _ in range(2 * ROUNDS + 1)]
    _release(model)
    return found[1:]


def main(*arguments: str) -> None:
    if arguments[0] == "--graphs-only":
        graphs(Path(arguments[1]))
    elif arguments[0] == "--products":
        products(Path(arguments[1]))
    elif arguments[0] == "--one":
        measure(Path(arguments[1]), Path(arguments[2]), arguments[3])
    else:
        folder, work, out, *precisions = arguments
        run(Path(folder), Path(work), Path(out), tuple(precisions) or PRECISIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])
