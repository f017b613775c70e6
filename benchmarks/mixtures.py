"""`mixtures`: prompts and decode steps of mixtures of experts, beside transformers, with the memory of each.

In: shapes, cut in layers and experts to what fits. Out: for each number of tokens seconds of a step, tokens a second,
and the peak memory of the process so far, over what the weights take. Each contestant has a process of its own, for its
memory; they take rounds in turn.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import options
from benchmarks.decode import prepare
from benchmarks.measure import deliver, in_turn, ratios, read_json, spread, surroundings, thread_count, write_json
from benchmarks.shapes import config_of
from lockstep import Advance, Model

PACKAGES = ("numpy", "onnxruntime", "torch", "transformers")
SHAPES = ("qwen3-30b-a3b", "deepseek-v3")
OPTIONS = (
    options.Option("--shape", "A shape, or a config.json of a mixture.", SHAPES, name="shapes", many=True),
    options.number("--layers", 1, "Layers that are left of each shape."),
    options.number("--experts", None, "Experts of a layer.  [default: all]"),
    options.number("--tokens", (1, 64, 512, 2048), "Tokens of a step.", name="counts", many=True),
    options.choice("--precision", "fp32", "w8a16", "w4a16"), options.choice("--backend", "onnxruntime", "openvino"),
    options.Option("--alone", "Without transformers, which needs the weights in fp32.", False, bool),
    options.THREADS, options.rounds(), options.WRITE,
)  # fmt: skip
_VOCABULARY = 1024  # neither embedding nor head is what is measured
Step = Callable[[int], tuple[float, float]]  # tokens -> seconds, peak MB of the process


def main(shapes: Sequence[str], write: Path | None, **settings: Any) -> None:
    """Measure steps of mixtures of experts and their memory, beside transformers."""
    measured = {Path(shape).stem: run(shape, **settings) for shape in shapes}
    found = {"benchmark": "mixtures", "precision": settings["precision"], "shapes": measured}
    deliver({**found, **surroundings(*PACKAGES, threads=settings["threads"])}, write)


def run(
    shape: str,
    layers: int,
    experts: int | None,
    counts: Sequence[int],
    precision: str,
    backend: str,
    alone: bool,
    threads: int | None,
    rounds: int,
) -> dict[str, Any]:
    """Measure one shape; settings as of the options."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_json(work / "shape.json", cut(read_json(config_of(shape)), layers, experts))
        folder = lockstep.make_random_checkpoint(work / "shape.json", 0, work / "checkpoint")
        paths = prepare(folder, precision, work / "results", backend=backend)
        count = thread_count(threads)
        weights = read_json(paths["weights"])["tensors"].values()
        megabytes = {backend: sum(place["length"] for place in weights) / 1e6}
        steps = {backend: start(_lockstep, paths, max(counts), count)}
        if not alone:
            steps["transformers"] = start(_transformers, folder, count)
            megabytes["transformers"] = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
        measured = {}
        for tokens in sorted(counts):
            peaks = dict.fromkeys(steps, 0.0)

            def timed(name: str, tokens: int = tokens, peaks: dict[str, float] = peaks) -> float:
                seconds, peaks[name] = steps[name](tokens)
                return seconds

            times = in_turn({name: lambda name=name: timed(name) for name in steps}, rounds)
            measured[str(tokens)] = {
                name: {
                    "seconds": spread(values),
                    "tokens_per_second": round(tokens / spread(values)["median"], 1),
                    "peak_mb": round(peaks[name], 1),
                    "memory_over_weights": round(peaks[name] / megabytes[name], 3),
                }
                for name, values in times.items()
            } | ({} if alone else {"speed_relative_to_transformers": ratios(times, backend)["transformers"]})
        for step in steps.values():
            step(0)
        return {"layers": layers, "weights_mb": {k: round(v, 1) for k, v in megabytes.items()}, "tokens": measured}


def cut(config: dict[str, Any], layers: int, experts: int | None) -> dict[str, Any]:
    """Return a shape of fewer layers and experts, all of whose layers are mixtures."""
    smaller = {**config, "num_hidden_layers": layers, "vocab_size": _VOCABULARY, "dtype": "float32"}
    dense = {"first_k_dense_replace": 0, "mlp_only_layers": []}
    smaller |= {key: value for key, value in dense.items() if key in config}
    smaller |= {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    if experts is not None:
        smaller |= {key: experts for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config}
    return smaller


def start(make: Callable[..., Callable[[int], float]], *arguments: Any) -> Step:
    """Start a contestant in a process of its own; it ends with a step of 0 tokens."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, make, arguments), daemon=True)
    process.start()

    def step(tokens: int) -> tuple[float, float]:
        here.send(tokens)
        if not tokens:
            process.join()
            return 0.0, 0.0
        return here.recv()

    return step


def _serve(connection: Connection, make: Callable[..., Callable[[int], float]], arguments: Sequence[Any]) -> None:
    run = make(*arguments)
    while tokens := connection.recv():
        connection.send((run(tokens), peak_mb()))


def peak_mb() -> float:
    """Return the largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6


def _tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count)


def _lockstep(paths: dict[str, Path], capacity: int, threads: int) -> Callable[[int], float]:
    model = Model.open(
        paths["engines"], paths["assembly"], paths["weights"], "all",
        max_batch_size=1, max_seq_len=capacity + 1, threads=threads,
    )  # fmt: skip

    def step(tokens: int) -> float:
        prompt = _tokens(tokens)
        began = time.perf_counter()
        model.step([Advance(0, prompt, 0)])
        return time.perf_counter() - began

    return step


def _transformers(folder: Path, threads: int) -> Callable[[int], float]:
    import torch
    from transformers import AutoModelForCausalLM

    from lockstep.export.quiet import quiet

    torch.set_num_threads(threads)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    def step(tokens: int) -> float:
        prompt = torch.from_numpy(_tokens(tokens))[None]
        began = time.perf_counter()
        with torch.inference_mode():
            model(prompt, use_cache=False, logits_to_keep=1)
        return time.perf_counter() - began

    return step
