"""Explain a failed check: the first engine that differs from its graph.

Needs the engines' runtime, no torch: here the graphs are the reference.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.bisect_report import FoundFault, MeasuredOutput
from lockstep.artifacts.reports import GoldenReport
from lockstep.backends.engine_set import EngineSet
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.manifests.manifest_files import failed_path
from lockstep.onnx_tools.judge import Bound
from lockstep.onnx_tools.overflow import OVERFLOWS
from lockstep.runtime import Advance, Model, ModelOptions
from lockstep.targets import Target
from lockstep.tolerances import LOGITS, Tolerances
from lockstep.verify.bisect.faults import engine_fault
from lockstep.verify.bisect.measure import Engines, measure, measure_walk
from lockstep.verify.bisect.report import answer
from lockstep.verify.bisect.request import failing
from lockstep.verify.graphs import Graphs
from lockstep.verify.walk import Stage, Tokens
from lockstep.weights import Weights

SECONDS = 60.0


@dataclass(frozen=True)
class EngineReport:
    """Engines compared with their graphs.

    finished: False where the time was over before the last stage. overflow: a line where a graph exceeds float16, else
    empty.
    """

    rows: tuple[MeasuredOutput, ...]
    fault: FoundFault | None
    finished: bool
    overflow: str


def explain_failure(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    layers: int | str,
    tolerance: Tolerances,
    target: str,
    request: Tokens,
    logit_bound: float | None = None,
    seconds: float = SECONDS,
) -> str:
    """Return a sentence: the first engine that differs from its graph, or that none does; and what to run next.

    target: its name, for the advice. request: the failing one. logit_bound: as of `engine_report`. Stops between two
    stages when `seconds` are over. Raises nothing: the caller has a failure to report.
    """
    further = f"graph against PyTorch: lockstep bisect {target}"
    try:
        files = assembly_json, weights_json, engines_json
        report = engine_report(*files, layers, tolerance, request, logit_bound, seconds)
    except (LockstepError, OSError, MemoryError) as error:
        return f"bisect cannot run the engines with their graphs: {' '.join(str(error).split())}; {further}"
    if report.fault:
        return f"{answer(report.fault)}; {report.fault.look_at}"
    if report.overflow:
        return report.overflow
    if not report.finished:
        reached = f"{report.rows[-1].graph} at layer {report.rows[-1].layer}"
        return f"engines agree with their graphs as far as {seconds:g} s took ({reached}); {further}"
    agree = "each engine alone agrees with its graph on these tokens"
    last = report.rows[-1]
    if last.part == "runtime" and not last.passed:
        agree += f", but the logits of lockstep.runtime are off from position {last.position} on"
    return f"{agree}; {further}"


def explained(
    error: CheckError,
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    reference_json: Path,
    target: Target,
    tolerance: Tolerances,
    out: Path,
) -> CheckError:
    """Add to the error of a golden check which engine first differs from its graph. out: the check's report."""
    failed = failed_path(out)
    if str(failed) not in str(error):  # it failed before there was a report
        return error
    request = failing(reference_json, failed)
    if request is None:  # no prompt is wrong
        return error
    files = assembly_json, weights_json, engines_json
    logit_bound = GoldenReport.load(failed).tolerance
    why = explain_failure(*files, target.layers, tolerance, str(target), request.tokens, logit_bound)
    lines = [str(error), why]
    if why.startswith(OVERFLOWS):  # the model exceeds float16: that says more than the error of a logit
        lines.reverse()
    return CheckError("; ".join(lines))


def engine_report(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    layers: int | str,
    tolerance: Tolerances,
    request: Tokens,
    logit_bound: float | None = None,
    seconds: float = math.inf,
    threads: int | None = None,
    inputs: Path | None = None,
) -> EngineReport:
    """Compare engines with their graphs along a request; where no engine is at fault, the runtime's logits too.

    logit_bound: the largest error of a logit that passes; None: where the request has no measured noise, it is
    assumed. inputs: as of `engine_fault`.
    """
    deadline = time.monotonic() + seconds
    graphs = open_graphs(assembly_json, weights_json, layers, threads)
    engines = Engines(EngineSet.open(engines_json, assembly_json), graphs.weights, threads)
    walk = measure_walk(graphs, engines, request, tolerance, deadline)
    fault = engine_fault(walk, graphs, engines, assembly_json, inputs)
    rows = walk.rows
    if fault is None and walk.logits is not None:
        options = ModelOptions(max_batch_size=1, max_seq_len=len(request.ids), threads=threads, low_memory=True)
        model = Model.open(engines_json, assembly_json, weights_json, layers, options)
        if logit_bound is None:
            logit_bound = tolerance.noise * tolerance.rounding * LOGITS * float(np.abs(walk.logits).max())
        rows += (_runtime_error(model, request, walk.logits, logit_bound),)
    return EngineReport(rows, fault, walk.finished, walk.overflow)


def _runtime_error(model: Model, request: Tokens, expected: np.ndarray, logit_bound: float) -> MeasuredOutput:
    """Run a request in steps, as the server does, and compare their logits. expected: after each token."""
    total = len(request.ids)
    chunk_size = model.max_num_tokens or total
    # The prompt in chunks, then each token of the answer alone.
    ends = [*range(chunk_size, request.num_prompt, chunk_size), *range(request.num_prompt, total + 1)]
    spans = zip((0, *ends), ends)
    logits = np.concatenate([model.step([Advance(0, request.ids[start:end], start)]) for start, end in spans])
    positions = np.array(ends) - 1
    return steps_error("runtime", "graph", expected[positions], logits, positions, logit_bound)


def steps_error(
    part: str, against: str, expected: np.ndarray, actual: np.ndarray, positions: np.ndarray, logit_bound: float
) -> MeasuredOutput:
    """Compare the logits after the tokens at `positions`; errors are absolute."""
    stage = Stage(part, "", "", None, {}, {}, positions)
    return measure(stage, "logits", against, expected, actual, Bound(logit_bound), 1.0)


def open_graphs(assembly_json: Path, weights_json: Path, layers: int | str, threads: int | None = None) -> Graphs:
    """Open the graphs of an assembly on disk. Raises InputError for a model of several ranks."""
    assembly = Assembly.load(assembly_json)
    if assembly.tensor_parallel is not None:
        raise InputError(
            f"bisect: expected a model of one rank, found tensor_parallel: {assembly.tensor_parallel.degree}; "
            "bisect the same model without it: the message of validate names the layer where ranks differ"
        )
    return Graphs(assembly_json, assembly, Weights.open(weights_json), layers, threads)
