"""Run the bisect command on a target's results.

A target's results in; which graph or engine is off first, at which node and position, out. Needs torch and
transformers.

PyTorch runs first, a layer at a time, and its activations are kept. Then each stage's graph runs on what PyTorch had
there, and each engine on what the graphs give: in another Python, where its backend lives there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file

from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.bisect_report import BisectReport, EngineReport, FoundFault, MeasuredOutput, StepsError
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.reference import ReferenceManifest
from lockstep.errors import InputError
from lockstep.targets import Results, Target, Tolerances
from lockstep.verify.bisect.explain import engine_report_json, open_graphs
from lockstep.verify.bisect.export_again import export_again
from lockstep.verify.bisect.faults import differing, graph_fault, walk_stages
from lockstep.verify.bisect.report import advice, answer, largest_within
from lockstep.verify.bisect.request import Request, choose
from lockstep.verify.bisect.served import compare_steps
from lockstep.verify.bisect.streamed import StreamedModel
from lockstep.verify.golden.prompts import read_reference
from lockstep.verify.graphs import Graphs
from lockstep.verify.validate.torch_trace import Record
from lockstep.weights import Weights

Ask = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Right:
    """The reference of a bisection.

    What PyTorch computes of a request, exact and in fp16, and the graphs as an export gives them now (or why there are
    none).
    """

    record: Record
    noisy: Record
    clean: Graphs | str


def make_right(
    config: Mapping[str, Any],
    weights: Weights,
    layers: int | str,
    ids: np.ndarray,
    threads: int | None = None,
    adapters: LoraSlots | None = None,
    residual: str | None = None,
) -> Right:
    """Run `ids` through PyTorch on these weights, and export the model again."""
    clean = export_again(config, weights, layers, threads, adapters, residual)
    model = StreamedModel(config, weights, layers)
    record = model.record(ids)
    return Right(record, model.noisy(record), clean)


class _Paths(NamedTuple):
    checkpoint: Path
    weights: Path
    assembly: Path
    engines: Path

    @classmethod
    def of(cls, results: Results, target: Target) -> _Paths:
        """Return where a target's results lie. Raises InputError where some, but for engines, are not there."""
        model, precision = target.model, target.precision
        graphs = results.checkpoint(model), results.weights(model, precision), results.assembly(model, precision)
        for path in graphs:
            if not path.is_file():
                raise InputError(f"{path}: expected the results of {target}, found none; run `lockstep run` first")
        return cls(*graphs, results.engines(model, precision, target.backend))


def bisect(
    results: Results,
    target: Target,
    tolerance: Tolerances,
    ask: Ask | None = None,
    prompt: str | None = None,
    threads: int | None = None,
    right: Right | None = None,
) -> BisectReport:
    """Follow a request through PyTorch, graphs and engines.

    ask: runs `explain.engine_report`, whose arguments it takes, in the Python of the target's backend, and gives its
    JSON; None where that is this one. prompt: a text to follow instead of the failing one. right: of the same model and
    request, where it was made before.

    Raises InputError without results or for a prompt that gives no tokens, CheckError for graphs or engines that are
    damaged or cannot run.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    paths = _Paths.of(results, target)
    graphs = open_graphs(paths.assembly, paths.weights, target.layers, threads)
    request = choose(results, target, prompt, graphs.assembly.vocab_size)
    _check_length(request, graphs.assembly.max_position_embeddings)
    if right is None:
        config = CheckpointManifest.load(paths.checkpoint).config
        made_for = graphs.assembly.adapters, graphs.assembly.residual
        right = make_right(config, graphs.weights, target.layers, request.tokens.ids, threads, *made_for)
    logits = right.record.logits
    tolerance = replace(tolerance, logits=_logit_bound(results, target, tolerance))
    recorded = replace(request.tokens, record=right.record, noisy=right.noisy)
    walked = walk_stages(graphs, None, recorded, tolerance)
    notes = _notes(paths, graphs, right.clean)
    faults = [graph_fault(walked, graphs, right.clean, paths.assembly.parent)]
    rows, served, overflow = walked.rows, None, walked.overflow or None
    stages = walked.rows  # in the order in which they run
    if paths.engines.is_file():
        engines = _ask(ask or engine_report_json, paths, target, tolerance, request, threads)
        faults.append(engines.fault)
        rows, served, overflow = rows + engines.rows, engines.served, overflow or engines.overflow
        stages = engines.rows
        if ask:
            notes.append("the engines ran in their backend's own Python")
    found = _in_order([fault for fault in faults if fault], stages)
    weights = _weights_error(results, target, request, logits, tolerance)
    line, look_at = _verdict(found, rows, served, weights, overflow, results, target)
    return BisectReport(
        target=str(target),
        prompt=request.text,
        chosen=request.why,
        num_tokens=len(request.tokens.ids),
        num_prompt=request.tokens.num_prompt,
        wrong=line.partition(":")[0],
        answer=line,
        look_at=tuple(look_at),
        faults=tuple(found),
        served=served,
        weights=weights,
        rows=rows,
        notes=(f"chosen: {request.why}", *notes),
    )


def _notes(paths: _Paths, graphs: Graphs, clean: Graphs | str) -> list[str]:
    """List what was not looked at, and where the assembly is not what an export gives now."""
    notes = []
    if not paths.engines.is_file():
        notes.append(f"no engines at {paths.engines}: only the graphs were looked at")
    if graphs.assembly.adapters is not None:
        notes.append("the model takes adapters: the request is followed without one; for those see the check `adapted`")
    if isinstance(clean, str):
        return [*notes, f"the model cannot be exported again: {clean}"]
    return [*notes, *differing(graphs, clean)]


def _logit_bound(results: Results, target: Target, tolerance: Tolerances) -> float | None:
    """Return the largest error of a logit that passes in the golden check; None without a reference."""
    path = results.reference_of(target.model, target.precision, target.layers)
    if tolerance.logits is not None or not path.is_file():
        return tolerance.logits
    prompts, long, _ = read_reference(path, (), tolerance)
    return max(prompt.bounds.largest for prompt in [*prompts, *([long.prompt] if long else [])])


def _ask(
    ask: Ask, paths: _Paths, target: Target, tolerance: Tolerances, request: Request, threads: int | None
) -> EngineReport:
    """Compare engines with their graphs on what the graphs give, in the Python of their backend."""
    tokens = [request.tokens.ids.tolist(), request.tokens.num_prompt]
    files = {name: str(getattr(paths, name)) for name in ("assembly", "weights", "engines")}
    bounds = asdict(tolerance)
    return EngineReport.from_json(ask(**files, layers=target.layers, tolerance=bounds, tokens=tokens, threads=threads))


def _in_order(faults: list[FoundFault], rows: Sequence[MeasuredOutput]) -> list[FoundFault]:
    """Sort faults by the stage where each shows, in the order in which the stages run."""
    order = {row.stage: number for number, row in reversed(list(enumerate(rows)))}
    return sorted(faults, key=lambda fault: order.get(fault.measured.stage, len(order)))


def _check_length(request: Request, longest: int | None) -> None:
    if longest is not None and len(request.tokens.ids) > longest:
        raise InputError(
            f"prompt {request.text[:40]!r}: expected at most {longest} tokens (max_position_embeddings), "
            f"found {len(request.tokens.ids)}; give a shorter one"
        )


def _weights_error(
    results: Results, target: Target, request: Request, logits: np.ndarray, tolerance: Tolerances
) -> StepsError | None:
    """Measure how far PyTorch on the target's weights is from the reference."""
    if request.number is None:
        return None
    path = results.reference_of(target.model, target.precision, target.layers)
    reference = load_file(path.parent / ReferenceManifest.load(path).logits.file)[f"logits.{request.number}"]
    first = request.tokens.num_prompt
    found = dict(enumerate(logits[first - 1 :], first))
    return compare_steps(dict(enumerate(reference, first)), found, tolerance)


def _verdict(
    faults: Sequence[FoundFault],
    rows: Sequence[MeasuredOutput],
    served: StepsError | None,
    weights: StepsError | None,
    overflow: str | None,
    results: Results,
    target: Target,
) -> tuple[str, list[str]]:
    if faults:
        return answer(faults[0]), [*advice(faults[0]), *(f"next, {answer(fault)}" for fault in faults[1:])]
    if overflow:
        what, _, remedy = overflow.partition("; ")
        return f"overflow: {what}", [remedy]
    within = largest_within(rows)
    if weights and not weights.passed:
        file = results.weights(target.model, target.precision)
        return (
            f"weights: PyTorch on {file} is off the reference from position {weights.position} on, {_found(weights)}",
            [f"{file}: delete it and convert again"],
        )
    if served and not served.passed:
        where = f"off from position {served.position} on, {_found(served)}"
        line = f"runtime: each graph and each engine alone is right, but the logits of lockstep.runtime are {where}"
        return line, [
            "how steps are packed and cache rows are kept (lockstep.runtime), or errors that accumulate",
            within,
        ]
    return f"nothing: no graph and no engine is off on these tokens; {within}", [
        "another prompt (--prompt), or what this request cannot show: other requests beside it"
    ]


def _found(error: StepsError) -> str:
    shown = "NaN or infinity" if error.max_abs_error is None else f"{error.max_abs_error:.1e}"
    return f"largest error {shown} (tolerance {error.tolerance:g})"
