"""`decode`: a decode step of the engine set, compared with transformers, in one process and in turn.

In: a checkpoint folder (and the precision). Out: seconds a step of each contestant at each batch size, and the ratios.
Both get the same prompts, threads and number of steps, and their logits are compared before anything is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import options
from benchmarks.measure import deliver, in_turn, ratios, spread, surroundings, thread_count
from benchmarks.shapes import checkpoint
from lockstep import Advance, CheckError, Model, ModelOptions, Results

OPTIONS = (
    options.MODELS, options.BATCHES, options.CONTEXT, options.STEPS, options.choice("--precision", "fp32", "fp16"),
    options.THREADS, options.rounds(), options.WRITE,
)  # fmt: skip
PACKAGES = ("numpy", "onnxruntime", "torch", "transformers")
_BACKEND = "onnxruntime"


def main(
    models: Sequence[str], precision: str, batches: Sequence[int], write: Path | None, threads: int | None, **sizes: int
) -> None:
    """Compare a decode step with transformers eager, in turn."""
    measured = {}
    for model in models:
        with tempfile.TemporaryDirectory() as work:
            folder = checkpoint(model, Path(work))
            measured[folder.name] = run(folder, precision, batches, Path(work) / "results", threads=threads, **sizes)
    about = {"benchmark": "decode", "precision": precision, "models": measured}
    deliver({**about, **surroundings(*PACKAGES, threads=threads)}, write)


def run(
    folder: Path,
    precision: str,
    batches: Sequence[int],
    work: Path,
    context: int = 64,
    steps: int = 32,
    rounds: int = 7,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure a decode step at each batch size.

    `context` tokens are in the cache when the `steps` timed steps of a round begin.

    Raises CheckError when the contestants do not agree, since then the times would mean nothing.
    """
    paths = prepare(folder, precision, work)
    measured = {}
    for batch in batches:
        contestants, agreement = _contestants(folder, paths, precision, batch, context, steps, thread_count(threads))
        times = in_turn(contestants, rounds)
        measured[str(batch)] = {
            "seconds_per_step": {name: spread(values) for name, values in times.items()},
            "speed_of_lockstep_relative_to": ratios(times, "lockstep"),
            "largest_logit_difference": agreement,
        }
    return {"context": context, "steps": steps, "rounds": rounds, "batch": measured}


def prepare(
    folder: Path,
    precision: str,
    work: Path,
    group_size: int = 32,
    backend: str = _BACKEND,
    head_bits: int | None = None,
) -> dict[str, Path]:
    """Resolve, export, convert and build the checkpoint below `work`; return the paths of the results."""
    results = Results(work)
    name = folder.name
    checkpoint = results.checkpoint(name)
    weights = results.weights(name, precision)
    assembly = results.assembly(name, precision)
    engines = results.engines(name, precision, backend)
    lockstep.resolve_checkpoint(str(folder.resolve()), folder.resolve(), checkpoint)
    lockstep.export_graphs(checkpoint, precision, assembly, group_size=group_size, head_bits=head_bits)
    lockstep.convert_weights(checkpoint, precision, weights, assembly)
    lockstep.build_engines(assembly, backend, engines)
    return {"weights": weights, "assembly": assembly, "engines": engines}


def _contestants(
    folder, paths, precision, batch, context, steps, threads
) -> tuple[dict[str, Callable[[], float]], dict[str, float]]:
    prompt = np.random.default_rng(0).integers(0, 256, (batch, context))
    makers = {
        "lockstep": decoding(paths, batch, context + steps, threads),
        "transformers, eager": _transformers(folder, precision, threads),
    }
    logits = {}
    timed = {}
    for name, start in makers.items():
        step, last = start(prompt)
        logits[name] = last
        timed[name] = lambda start=start: time_steps(start, prompt, steps)
    expected = logits.pop("transformers, eager")
    difference = {name: float(np.abs(values - expected).max()) for name, values in logits.items()}
    # fp32 differs by the order of sums; fp16 products are rounded at other places by each.
    allowed = {"fp32": 1e-3, "fp16": 1e-1}[precision]
    if not all(value <= allowed for value in difference.values()):
        raise CheckError(f"{folder}: expected contestants whose logits differ by at most {allowed}, found {difference}")
    return timed, difference


def time_steps(
    start: Callable, prompt: np.ndarray, steps: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds a step, after the prompt. start: of `decoding`."""
    step, logits = start(prompt)
    began = clock()
    for _ in range(steps):
        logits = step(logits.argmax(-1))
    return (clock() - began) / steps


def decoding(paths, batch: int, capacity: int, threads: int) -> Callable:
    """Return the calls of an opened model, for prompts [batch, tokens].

    One takes a step, the other gives the logits after the prompts.
    """
    model = Model.open(
        paths["engines"],
        paths["assembly"],
        paths["weights"],
        "all",
        ModelOptions(max_batch_size=batch, max_seq_len=capacity, threads=threads),
    )

    def start(prompt: np.ndarray):
        lengths = [prompt.shape[1]]
        logits = model.step([Advance(slot, row, 0) for slot, row in enumerate(prompt)])

        def step(tokens: np.ndarray) -> np.ndarray:
            result = model.step([Advance(slot, tokens[slot : slot + 1], lengths[0]) for slot in range(len(prompt))])
            lengths[0] += 1
            return result

        return step, logits

    return start


def _transformers(folder: Path, precision: str, threads: int) -> Callable:
    import torch
    from transformers import AutoModelForCausalLM

    from lockstep.export.quiet import quiet

    torch.set_num_threads(threads)
    with quiet():
        dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        ).eval()

    def start(prompt: np.ndarray):
        with torch.inference_mode():
            first = model(torch.from_numpy(prompt), use_cache=True)
        cache = first.past_key_values

        def step(tokens: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return (
                    model(torch.from_numpy(tokens[:, None]), past_key_values=cache, use_cache=True)
                    .logits[:, -1]
                    .numpy()
                )

        return step, first.logits[:, -1].float().numpy()

    return start
