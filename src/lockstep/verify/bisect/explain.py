"""Explain a failed check: the first engine that differs from its graph.

Needs the engines' runtime, no torch: here the graphs are the reference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.bisect_report import EngineReport, MeasuredOutput
from lockstep.artifacts.reports import GoldenReport
from lockstep.backends import EngineSet
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.manifests.manifest_files import failed_path
from lockstep.onnx_tools.overflow import OVERFLOWS
from lockstep.runtime import Advance, Model, ModelOptions
from lockstep.targets import Target
from lockstep.tolerances import LOGITS, Tolerances
from lockstep.verify.bisect.faults import engine_fault
from lockstep.verify.bisect.report import answer
from lockstep.verify.bisect.request import failing
from lockstep.verify.bisect.walked import Engines, measure, walk_stages
from lockstep.verify.graphs import Graphs
from lockstep.verify.walk import Stage, Tokens
from lockstep.weights import Weights

SECONDS = 60.0


def explain_failure(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    layers: int | str,
    tolerance: Tolerances,
    target: str,
    tokens: tuple[Sequence[int], int],
    seconds: float = SECONDS,
) -> str:
    """Return a sentence: the first engine that differs from its graph, or that none does; and what to run next.

    target: its name, for the advice. tokens: ids of the failing request, and how many of them are its prompt. Stops
    between two stages when `seconds` are over. Raises nothing: the caller has a failure to report.
    """
    further = f"graph against PyTorch: lockstep bisect {target}"
    try:
        files = str(assembly_json), str(weights_json), str(engines_json)
        report = EngineReport.from_json(engine_report(*files, layers, asdict(tolerance), tokens, seconds))
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
    bounds = replace(tolerance, logits=GoldenReport.load(failed).tolerance)
    tokens = request.tokens.ids.tolist(), request.tokens.num_prompt
    why = explain_failure(assembly_json, weights_json, engines_json, target.layers, bounds, str(target), tokens)
    lines = [str(error), why]
    if why.startswith(OVERFLOWS):  # the model exceeds float16: that says more than the error of a logit
        lines.reverse()
    return CheckError("; ".join(lines))


def engine_report(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    tolerance: Mapping[str, Any],
    tokens: Sequence[Any],
    seconds: float = math.inf,
    threads: int | None = None,
    inputs: Path | None = None,
) -> dict[str, Any]:
    """Compare engines with their graphs along tokens; where no engine is at fault, the runtime's logits too.

    Returns the JSON of an `EngineReport`. tokens: ids, and how many of them are the prompt. inputs: as of
    `engine_fault`.
    """
    assembly_json, weights_json, engines_json = map(Path, (assembly, weights, engines))
    bounds = Tolerances(**tolerance)
    request = Tokens(np.asarray(tokens[0], np.int64), tokens[1])
    deadline = time.monotonic() + seconds
    graphs = open_graphs(assembly_json, weights_json, layers, threads)
    opened = Engines(EngineSet.open(engines_json, assembly_json), graphs.weights, threads)
    walked = walk_stages(graphs, opened, request, bounds, deadline=deadline)
    fault = engine_fault(walked, graphs, opened, assembly_json, inputs)
    rows = walked.rows
    if fault is None and walked.logits is not None:
        files = (engines_json, assembly_json, weights_json)
        length = len(request.ids)
        model = Model.open(
            *files, layers, ModelOptions(max_batch_size=1, max_seq_len=length, threads=threads, low_memory=True)
        )
        rows += (_served(model, request, walked.logits, bounds),)
    return EngineReport(rows, fault, walked.finished, walked.overflow or None).to_json()


def _served(model: Model, tokens: Tokens, expected: np.ndarray, tolerance: Tolerances) -> MeasuredOutput:
    """Run the tokens as the server does, and compare each step's logits. expected: of all tokens."""
    room = model.max_num_tokens or len(tokens.ids)
    total = len(tokens.ids)
    ends = [*range(room, tokens.num_prompt, room), *range(tokens.num_prompt, total + 1)]
    pairs = zip((0, *ends), ends)
    logits = np.concatenate([model.step([Advance(0, tokens.ids[start:end], start)]) for start, end in pairs])
    positions = np.array(ends) - 1
    return steps_error("runtime", "graph", expected[positions], logits, positions, tolerance)


def steps_error(
    part: str, against: str, expected: np.ndarray, actual: np.ndarray, positions: np.ndarray, tolerance: Tolerances
) -> MeasuredOutput:
    """Compare the logits after the tokens at `positions`."""
    if tolerance.logits is None:  # no noise of this request: compare as an engine with its graph
        noise = LOGITS * float(np.abs(expected).max())
        tolerance = replace(tolerance, logits=tolerance.noise * tolerance.rounding * noise)
    return measure(Stage(part, "", "", None, {}, {}, positions), "logits", against, expected, actual, tolerance)


def open_graphs(assembly_json: Path, weights_json: Path, layers: int | str, threads: int | None = None) -> Graphs:
    """Open the graphs of an assembly on disk. Raises InputError for a model of several ranks."""
    assembly = Assembly.load(assembly_json)
    if assembly.tensor_parallel is not None:
        raise InputError(
            f"bisect: expected a model of one rank, found tensor_parallel: {assembly.tensor_parallel.degree}; "
            "bisect the same model without it: the message of validate names the layer where ranks differ"
        )
    return Graphs(assembly_json, assembly, Weights.open(weights_json), layers, threads)
