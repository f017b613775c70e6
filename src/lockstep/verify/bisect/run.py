"""Run the bisect command on a target's results.

A target's results in; the first faulty graph or engine, and its first wrong position, out. Needs torch and
transformers.

PyTorch runs first, and its activations are kept. Then each stage's graph runs on PyTorch's activations there, and each
engine on its graph's inputs: so one error does not show in all later stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file

from lockstep.artifacts.bisect_report import BisectReport, MeasuredOutput
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.reference import ReferenceManifest
from lockstep.errors import InputError
from lockstep.targets import Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.bisect.explain import engine_report, open_graphs, steps_error
from lockstep.verify.bisect.faults import graph_fault
from lockstep.verify.bisect.measure import measure_walk
from lockstep.verify.bisect.report import verdict
from lockstep.verify.bisect.request import Request, choose
from lockstep.verify.golden.prompts import read_reference
from lockstep.verify.graphs import Graphs
from lockstep.verify.records import Record
from lockstep.verify.validate.torch_trace import TorchModel


class TorchRun(NamedTuple):
    """PyTorch's activations for a request, exact and in fp16: what graphs are compared with."""

    record: Record
    noisy: Record


def run_torch(config: Mapping[str, Any], graphs: Graphs, ids: np.ndarray) -> TorchRun:
    """Run `ids` through PyTorch on the weights of `graphs`. config: config.json's."""
    model = TorchModel(config, graphs.weights, graphs.num_layers)
    record = model.record(ids)
    return TorchRun(record, model.noisy(record))


def bisect(
    results: Results,
    target: Target,
    tolerance: Tolerances,
    prompt: str | None = None,
    threads: int | None = None,
    torch_run: TorchRun | None = None,
    inputs: Path | None = None,
) -> BisectReport:
    """Follow a request through PyTorch, graphs and engines.

    prompt: a text to follow instead of the failing one. torch_run: of the same model and request, where it exists
    already. inputs: a file for the inputs of the faulty engine's graph.

    Raises InputError without results or for a prompt that gives no tokens, CheckError for graphs or engines that are
    damaged or cannot run.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint_json = results.checkpoint(target.model)
    weights_json = results.weights(target.model, target.precision)
    assembly_json = results.assembly(target.model, target.precision)
    engines_json = results.engines(target.model, target.precision, target.backend)
    for path in (checkpoint_json, weights_json, assembly_json):
        if not path.is_file():
            raise InputError(f"{path}: expected the results of {target}, found none; run `lockstep run` first")
    graphs = open_graphs(assembly_json, weights_json, target.layers, threads)
    request = choose(results, target, prompt, graphs.assembly.vocab_size)
    ids = request.tokens.ids
    longest = graphs.assembly.max_position_embeddings
    if longest is not None and len(ids) > longest:
        raise InputError(
            f"prompt {request.text[:40]!r}: expected at most {longest} tokens (max_position_embeddings), "
            f"found {len(ids)}; give a shorter one"
        )
    if torch_run is None:
        torch_run = run_torch(CheckpointManifest.load(checkpoint_json).config, graphs, ids)
    logit_bound = _logit_bound(results, target, tolerance)
    recorded = replace(request.tokens, record=torch_run.record, noisy=torch_run.noisy)
    walk = measure_walk(graphs, None, recorded, tolerance)
    notes = [f"chosen: {request.why}"]
    if graphs.assembly.adapters is not None:
        notes.append("the model takes adapters: the request is followed without one; for those see the check `adapted`")
    faults = [graph_fault(walk, graphs)]
    rows = walk.rows
    overflow = walk.overflow
    stages = walk.rows  # in the order in which they run
    if engines_json.is_file():
        files = assembly_json, weights_json, engines_json
        engines = engine_report(
            *files, target.layers, tolerance, request.tokens, logit_bound, threads=threads, inputs=inputs
        )
        faults.append(engines.fault)
        rows = rows + engines.rows
        overflow = overflow or engines.overflow
        stages = engines.rows
    else:
        notes.append(f"no engines at {engines_json}: only the graphs were looked at")
    # The fault of the earlier stage is the answer; a stage has several rows, of which the first counts.
    order = {row.stage: number for number, row in reversed(list(enumerate(stages)))}
    ordered = sorted(filter(None, faults), key=lambda fault: order.get(fault.measured.stage, len(order)))
    if request.number is not None and logit_bound is not None:
        rows += (_weights_error(results, target, request, torch_run.record.logits, logit_bound),)
    line, look_at = verdict(ordered, rows, overflow, weights_json)
    return BisectReport(
        target=str(target),
        prompt=request.text,
        chosen=request.why,
        num_tokens=len(request.tokens.ids),
        num_prompt=request.tokens.num_prompt,
        wrong=line.partition(":")[0],
        answer=line,
        look_at=tuple(look_at),
        faults=tuple(ordered),
        rows=rows,
        notes=tuple(notes),
    )


def _logit_bound(results: Results, target: Target, tolerance: Tolerances) -> float | None:
    """Return the largest error of a logit that passes in the golden check; None without a reference."""
    path = results.reference_of(target.model, target.precision, target.layers)
    if not path.is_file():
        return None
    prompts, long, _ = read_reference(path, (), tolerance)
    if long is not None:
        prompts.append(long.prompt)
    return max(prompt.bounds.largest for prompt in prompts)


def _weights_error(
    results: Results, target: Target, request: Request, logits: np.ndarray, logit_bound: float
) -> MeasuredOutput:
    """Measure how far PyTorch on the target's weights is from the reference."""
    path = results.reference_of(target.model, target.precision, target.layers)
    reference = load_file(path.parent / ReferenceManifest.load(path).logits.file)[f"logits.{request.number}"]
    positions = request.tokens.num_prompt - 1 + np.arange(len(reference))
    return steps_error("weights", "reference", reference, logits[positions], positions, logit_bound)
