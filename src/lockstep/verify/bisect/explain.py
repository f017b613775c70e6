"""Say where an engine set leaves its graphs, when a check of it has failed.

Needs what runs engines, no torch: the graphs are held for right here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.bisect_report import EngineReport, StepsError
from lockstep.artifacts.reports import GoldenReport
from lockstep.backends import EngineSet
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.manifests.manifest_files import failed_path
from lockstep.onnx_tools.overflow import OVERFLOWS
from lockstep.runtime import Model
from lockstep.targets import Target, Tolerances
from lockstep.verify.bisect.faults import engine_fault
from lockstep.verify.bisect.report import advice, answer
from lockstep.verify.bisect.request import failing
from lockstep.verify.bisect.walked import Engines, walk_stages
from lockstep.verify.golden.forced import Errors, Forced, force
from lockstep.verify.graphs import Graphs
from lockstep.verify.metrics import finite
from lockstep.verify.noise import LogitBounds, LogitNoise
from lockstep.verify.walk import Tokens
from lockstep.weights import Weights

SECONDS = 60.0
Followed = tuple[Sequence[int], int]  # ids, and how many of them are the prompt
_SYNTHETIC = 33  # ids where a check has no tokens of its own


def explain_failure(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    layers: int | str,
    tolerance: Tolerances,
    target: str,
    tokens: Followed | None,
    seconds: float = SECONDS,
) -> str:
    """Explain a failed check in one line: the first engine that leaves its graph, or that none does; what to run next.

    target: its name, for the advice. tokens: the failing request; without it seeded ones are taken. Stops between two
    stages when `seconds` are over. Raises nothing: whoever calls has a failure to report.
    """
    further = f"graph against PyTorch: lockstep bisect {target}"
    try:
        report = engine_report(assembly_json, weights_json, engines_json, layers, tolerance, tokens, seconds)
    except (LockstepError, OSError, MemoryError) as error:
        return f"bisect cannot run the engines beside their graphs: {' '.join(str(error).split())}; {further}"
    if report.fault:
        return "; ".join([answer(report.fault), *advice(report.fault)])
    if report.overflow:
        return report.overflow
    if not report.finished:
        reached = f"{report.rows[-1].graph} at layer {report.rows[-1].layer}"
        return f"engines agree with their graphs as far as {seconds:g} s took ({reached}); {further}"
    if report.served and not report.served.passed:
        off = f"the logits of lockstep.runtime are off from position {report.served.position} on"
        return f"each engine alone agrees with its graph on these tokens, but {off}; {further}"
    return f"each engine alone agrees with its graph on these tokens; {further}"


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
    """Add to the error of a golden check which engine leaves its graph first. out: the check's report."""
    failed = failed_path(out)
    if str(failed) not in str(error):
        return error
    request, bounds = failing(reference_json, failed), replace(tolerance, logits=GoldenReport.load(failed).tolerance)
    tokens = (request.tokens.ids.tolist(), request.tokens.num_prompt) if request else None
    why = explain_failure(assembly_json, weights_json, engines_json, target.layers, bounds, str(target), tokens)
    return CheckError("; ".join((why, str(error)) if why.startswith(OVERFLOWS) else (str(error), why)))


def engine_report_json(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    tolerance: Mapping[str, Any],
    tokens: list[Any],
    threads: int | None = None,
) -> dict[str, Any]:
    """Return `engine_report` as JSON, of arguments that are JSON: for the Python that has the backend's library."""
    bounds, followed = Tolerances(**tolerance), (tokens[0], tokens[1])
    return engine_report(
        Path(assembly), Path(weights), Path(engines), layers, bounds, followed, threads=threads
    ).to_json()


def engine_report(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    layers: int | str,
    tolerance: Tolerances,
    tokens: Followed | None,
    seconds: float | None = None,
    threads: int | None = None,
) -> EngineReport:
    """Compare engines with their graphs along tokens.

    served: how far the runtime's logits are from the graphs', once no engine is at fault; None otherwise.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    graphs = open_graphs(assembly_json, weights_json, layers, threads)
    engines = Engines(EngineSet.open(engines_json, assembly_json), graphs.weights, threads)
    ids, num_prompt = tokens or (_synthetic(graphs.assembly), 2 * _SYNTHETIC // 3)
    followed = Tokens(np.asarray(ids, np.int64), num_prompt)
    walked = walk_stages(graphs, engines, followed, tolerance, deadline=deadline)
    fault, served = engine_fault(walked, graphs, engines, assembly_json), None
    if fault is None and walked.logits is not None:
        files = engines_json, assembly_json, weights_json
        served = served_error(*files, layers, followed, walked.logits, tolerance, threads)
    return EngineReport(walked.rows, fault, served, walked.finished, walked.overflow or None)


def open_graphs(assembly_json: Path, weights_json: Path, layers: int | str, threads: int | None = None) -> Graphs:
    """Open the graphs of an assembly on disk. Raises InputError for a model of several ranks."""
    assembly = Assembly.load(assembly_json)
    if assembly.tensor_parallel is not None:
        raise InputError(
            f"bisect: expected a model of one rank, found tensor_parallel: {assembly.tensor_parallel.degree}; "
            "bisect the same model without it: what validate says names the layer of a difference of ranks"
        )
    return Graphs(assembly_json, assembly, Weights.open(weights_json), layers, threads)


def _synthetic(assembly: Assembly) -> np.ndarray:
    count = min(_SYNTHETIC, assembly.max_position_embeddings or _SYNTHETIC)
    return np.random.default_rng(0).integers(0, assembly.vocab_size, count)


def served_error(
    engines_json: Path,
    assembly_json: Path,
    weights_json: Path,
    layers: int | str,
    tokens: Tokens,
    expected: np.ndarray,
    tolerance: Tolerances,
    threads: int | None = None,
) -> StepsError:
    """Step through the tokens, and compare each step's logits. expected: [num_tokens, vocab_size]."""
    files, total = (engines_json, assembly_json, weights_json), len(tokens.ids)
    model = Model.open(*files, layers, max_batch_size=1, max_seq_len=total, threads=threads, low_memory=True)
    ends = tuple(range(tokens.num_prompt, total + 1))
    rows = {count: expected[count - 1] for count in ends}
    request = Forced(tokens.ids, rows, _bounds(rows, tolerance), ends)
    (errors,) = force(model, [request], model.max_num_tokens or total)
    return _steps_error(errors)


def compare_steps(
    expected: Mapping[int, np.ndarray], found: Mapping[int, np.ndarray], tolerance: Tolerances
) -> StepsError:
    errors = Errors(_bounds(expected, tolerance))
    for count, row in expected.items():
        errors.add(count, row, found[count])
    return _steps_error(errors)


def _bounds(expected: Mapping[int, np.ndarray], tolerance: Tolerances) -> LogitBounds:
    bound = tolerance.logits
    if bound is None:  # nothing was measured of this request: as of an engine beside its graph
        bound = tolerance.beside_graph * max(float(np.abs(row).max()) for row in expected.values())
    return LogitBounds(LogitNoise({}), replace(tolerance, logits=bound))


def _steps_error(errors: Errors) -> StepsError:
    count = errors.first[0] if errors.first else errors.worst_count
    return StepsError(finite(errors.worst), errors.bounds.largest, errors.first is None, count - 1)
