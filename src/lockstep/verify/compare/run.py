"""The compare stage: how far each engine of a set is from its graph.

An engine set with its assembly and weights in; for each engine its error against the graph in ONNX Runtime out.

The graph is the canonical one of the assembly, run unoptimised on a CPU. Graph and engine run on the same inputs, with
the weights of one layer: at several sizes of each optimization profile, attention also over caches up to the longest
(`inputs`), and at all sizes that the limits allow, as far as time allows (`sweep`). A `<variant>.rotary` or
`<mixer>.state` engine is a graph itself: there is nothing to compare.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from lockstep.artifacts.reports import PASS, ComparedEngine, ComparisonReport
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.graphs import HostGraph
from lockstep.onnx_tools import judge
from lockstep.progress import steps
from lockstep.targets import Limits
from lockstep.tolerances import Tolerances
from lockstep.verify.compare.pair import Pair
from lockstep.verify.metrics import finish
from lockstep.weights import Weights

SECONDS = 120.0  # for all sizes of an engine; the demo's take two


def run(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    tolerance: Tolerances,
    limits: Limits,
    out: Path,
    threads: int | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
) -> Path:
    """Compare the engines of a set with their graphs.

    Writes the report to `out`, which is returned. limits: where the engine set has none. seconds: of CPU time, of each
    thread, for the sizes of an engine besides those of its profiles; later sizes are then left untried. seed: draws,
    with the engine's digest, which sizes are tried, and in which order.

    Raises CheckError naming engine, sizes, output, error and tolerance for the first engine over it, when all are
    compared, and then writes the report to `<out>.failed.json`; InputError for inputs that do not fit together.
    """
    engines = EngineSet.open(engines_json, assembly_json)
    weights = Weights.open(weights_json)
    assembly = engines.assembly
    weights.check_precision(assembly.precision, "the assembly")
    graphs = dict(engines.backend.graphs(assembly, engines.manifest.options))
    compared: dict[str, ComparedEngine] = {}
    failures: list[str] = []
    names = [name for name in engines.names() if not isinstance(graphs[name], HostGraph)]
    for name in steps(names, "compare", "engines"):
        pair = Pair(engines, weights, Path(assembly_json).parent, name, graphs[name], limits, threads, seed)
        compared[name] = pair.compare(tolerance, seconds)
        failures += pair.failures[:1]
    # A set may consist of graphs alone, of which none is compared.
    worst_tolerance = 0.0
    relative_error: float | None = 0.0
    if compared:
        worst = max(compared.values(), key=judge.share)
        worst_tolerance = worst.tolerance
        relative_error = worst.relative_error
    report = ComparisonReport(
        result=PASS,
        backend=engines.backend.name,
        precision=assembly.precision,
        engine_digest=engines.digest(),
        versions={engines.backend.name: engines.backend.version(), "onnxruntime": onnxruntime.__version__},
        seed=seed,
        tolerance=worst_tolerance,
        engines=compared,
        relative_error=relative_error,
    )
    if len(failures) > 1:
        failures[0] += f" ({len(failures) - 1} more of {len(compared)} engines differ)"
    return finish(out, report, next(iter(failures), None))
