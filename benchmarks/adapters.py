"""`adapters`: what adapters cost on this CPU.

Steps of a model with an adapter in each row, with none, and of the same model whose graphs take none, in turn; and how
long one takes to load.

In: a shape, which gets random weights and random adapters of all linear layers. Out: a record.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import lockstep
from benchmarks import options
from benchmarks.engine_sets import make_engines
from benchmarks.measure import THREADS_VARIABLE, deliver, in_turn, read_json, spread, surroundings, thread_count
from benchmarks.shapes import checkpoint
from lockstep import Advance, Model, ModelOptions, Results

OPTIONS = (
    options.option("--shape", "A shape, which gets random weights.", "llama-1024x8"), options.BATCHES,
    options.number("--rank", 16, "Of each adapter.", maximum=128),
    options.number("--adapters", 4, "Resident together.", maximum=64),
    options.THREADS, options.CPU_TIME, options.rounds(), options.WRITE,
)  # fmt: skip
_CONTEXT = 64
_STEPS = 16
_PROMPT = 256
_NONE = "graphs without room"
_ROOM = "room, no row with one"
_EACH = "an adapter in each row"


def main(write: Path | None, **settings: Any) -> None:
    """Measure steps with an adapter in each row, with none, and without room for any."""
    deliver(run(**settings), write)


def run(
    shape: str,
    batches: Sequence[int],
    rank: int,
    adapters: int,
    rounds: int,
    threads: int | None,
    cpu_time: bool = False,
) -> dict[str, Any]:
    """Measure a shape, in a temporary folder.

    rank, adapters: of the adapters, and how many. cpu_time: take one thread, and the process's CPU seconds, which other
    work on the machine changes less.
    """
    clock = time.perf_counter
    if cpu_time:
        threads = 1
        clock = time.process_time
    os.environ[THREADS_VARIABLE] = str(thread_count(threads))  # of the builds too: a process has one pool
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = checkpoint(shape, work)
        room = {"max_adapters": adapters, "max_lora_rank": next(r for r in (8, 16, 32, 64, 128) if r >= rank)}
        plain = make_engines(source, "fp32", work / "plain")
        taking = _prepare(plain, source.name, work, room)
        names = [f"a{number}" for number in range(adapters)]
        nbytes = _make_adapters(work, source.name, plain, taking, names, rank)
        steps = {str(batch): _steps(plain, taking, names, batch, rounds, threads, clock) for batch in batches}
        load = _load(taking, names, rounds, threads, clock)
    return {
        "benchmark": "adapters",
        "shape": shape,
        "rank": rank,
        "adapters": adapters,
        "adapter_bytes": nbytes,
        "rounds": rounds,
        "seconds_of": "CPU time, one thread" if cpu_time else "wall time",
        "batch": steps,
        "load_seconds": load,
        **surroundings("numpy", "onnxruntime", threads=threads),
    }


def _prepare(plain: dict[str, Path], name: str, work: Path, room: dict[str, int]) -> dict[str, Path]:
    """Make the same model with room for adapters."""
    results = Results(work / "taking")
    assembly = results.assembly(name, "fp32")
    engines = results.engines(name, "fp32", "onnxruntime")
    lockstep.export_graphs(Results(work / "plain").checkpoint(name), "fp32", assembly, adapters=room)
    lockstep.build_engines(assembly, "onnxruntime", engines)
    return {**plain, "assembly": assembly, "engines": engines, "adapters": results.adapters(name)}


def _make_adapters(
    work: Path, name: str, plain: dict[str, Path], taking: dict[str, Path], names: Sequence[str], rank: int
) -> int:
    """Random adapters of all linear layers; gives the bytes of one."""
    checkpoint = Results(work / "plain").checkpoint(name)
    layers = {
        tensor.removesuffix(".weight"): place["shape"]
        for tensor, place in read_json(checkpoint)["tensors"].items()
        if tensor.endswith("_proj.weight")
    }
    folders = {}
    for number, adapter in enumerate(names):
        random = np.random.default_rng(number)
        tensors = {}
        for layer, (out_features, in_features) in layers.items():
            tensors[f"base_model.model.{layer}.lora_A.weight"] = (
                random.standard_normal((rank, in_features), np.float32) / 32
            )
            tensors[f"base_model.model.{layer}.lora_B.weight"] = (
                random.standard_normal((out_features, rank), np.float32) / 32
            )
        folder = folders[adapter] = work / adapter
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    sources = {adapter: str(folder) for adapter, folder in folders.items()}
    lockstep.resolve_adapters(sources, folders, checkpoint, 128, None, taking["adapters"])
    return (folders[names[0]] / "adapter_model.safetensors").stat().st_size


def _open(paths: dict[str, Path], batch: int, threads: int | None) -> Model:
    return Model.open(
        paths["engines"],
        paths["assembly"],
        paths["weights"],
        options=ModelOptions(
            max_batch_size=batch,
            max_seq_len=_PROMPT + _STEPS,
            max_num_tokens=_PROMPT * batch,
            threads=thread_count(threads),
            adapters_json=paths.get("adapters"),
        ),
    )


def _steps(
    plain: dict[str, Path],
    taking: dict[str, Path],
    names: Sequence[str],
    batch: int,
    rounds: int,
    threads: int | None,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Seconds of a decode step, and of a prompt, in each of three ways."""
    base = _open(plain, batch, threads)
    model = _open(taking, batch, threads)
    ways: dict[str, tuple[Model, Sequence[str | None]]] = {
        _NONE: (base, [None] * batch),
        _ROOM: (model, [None] * batch),
        _EACH: (model, [names[slot % len(names)] for slot in range(batch)]),
    }
    decode = {}
    prompt = {}
    for way, (of_way, adapters) in ways.items():
        decode[way] = functools.partial(_decode, of_way, adapters, clock)
        prompt[way] = functools.partial(_prompt, of_way, adapters, clock)
    return {"decode_step": _compared(in_turn(decode, rounds)), "prompt": _compared(in_turn(prompt, rounds))}


def _compared(times: dict[str, list[float]]) -> dict[str, Any]:
    times_as_long = {}
    for way in (_ROOM, _EACH):
        times_as_long[way] = spread([a / b for a, b in zip(times[way], times[_NONE], strict=True)], 3)
    return {"seconds": {way: spread(values) for way, values in times.items()}, "times_as_long": times_as_long}


def _begin(model: Model, adapters: Sequence[str | None], tokens: int) -> np.ndarray:
    for slot, adapter in enumerate(adapters):
        model.release(slot)
        model.set_adapter(slot, adapter)
    ids = np.random.default_rng(0).integers(0, 256, (len(adapters), tokens))
    return model.step_tokens([Advance(slot, row, 0) for slot, row in enumerate(ids)])


def _decode(model: Model, adapters: Sequence[str | None], clock: Callable[[], float]) -> float:
    tokens = _begin(model, adapters, _CONTEXT)
    began = clock()
    for number in range(_STEPS):
        tokens = model.step_tokens([Advance(slot, [token], _CONTEXT + number) for slot, token in enumerate(tokens)])
    return (clock() - began) / _STEPS


def _prompt(model: Model, adapters: Sequence[str | None], clock: Callable[[], float]) -> float:
    began = clock()
    _begin(model, adapters, _PROMPT)
    return clock() - began


def _load(
    taking: dict[str, Path], names: Sequence[str], rounds: int, threads: int | None, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds to bring an adapter that is not resident."""
    model = _open(taking, 1, threads)
    assert model.adapters is not None
    seconds = []
    for number in range(rounds + 1):
        model.adapters.residency.forget(0)
        model.set_adapter(0, names[number % len(names)])
        began = clock()
        model.adapters.load()
        seconds.append(clock() - began)
        model.release(0)
    return spread(seconds[1:])
