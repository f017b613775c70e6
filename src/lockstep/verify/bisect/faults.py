"""The fault of a graph or an engine, and the advice: measured stages in, a fault and the next command out."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lockstep.artifacts.bisect_report import FoundFault
from lockstep.backends.builder import build
from lockstep.verify.bisect.measure import Engines, MeasuredWalk
from lockstep.verify.graphs import Graphs

# Polygraphy's bisection of a graph. The reference is each node's output in ONNX Runtime without optimisations.
NODES = (
    "polygraphy run {graph} --onnxrt --graph-optimization-level ORT_DISABLE_ALL --load-inputs {inputs} "
    "--onnx-outputs '*' --save-outputs right.json && polygraphy data merge {inputs} right.json -o all.json && "
    "polygraphy debug reduce {graph} -o reduced.onnx --mode bisect --load-inputs all.json "
    "--check polygraphy run polygraphy_debug.onnx {runner} --load-inputs all.json --load-outputs right.json"
)


def engine_fault(
    walk: MeasuredWalk, graphs: Graphs, engines: Engines, assembly_json: Path, inputs: Path | None = None
) -> FoundFault | None:
    """Return the fault of the first engine over tolerance; None without one.

    inputs: a file to write the graph's inputs to, in Polygraphy's JSON.
    """
    failure = walk.first_failure("graph")
    if failure is None:
        return None
    stage = failure.stage
    backend = engines.set.backend
    file = engines.set.file(engines.name(stage.graph))
    if file.suffix == ".onnx":  # the bytes of other engines differ from build to build
        with tempfile.TemporaryDirectory() as folder:
            again = build(assembly_json, backend.name, Path(folder) / "engines.json", engines.set.manifest.options)
            if (again.parent / file.name).read_bytes() != file.read_bytes():
                advice = f"{file} is not what its graph builds to: delete it and build the engines again"
                return failure.fault("engine", advice)
    advice = f"{file}: build it again, or with a lower optimization_level, and report the block to {backend.name}"
    graph = graphs.graph(stage.graph)
    if not backend.polygraphy or graph.computed is not graph.model:  # ONNX Runtime has no bf16 on a CPU
        return failure.fault("engine", advice)
    if inputs is None:
        return failure.fault("engine", f"{advice}; `lockstep bisect` with --save-inputs FILE says how to find the node")
    from polygraphy.json import save_json

    save_json([graphs.feeds(stage.graph, stage.inputs, stage.slots)], str(inputs))
    nodes = NODES.format(graph=graph.path, inputs=inputs, runner=backend.polygraphy)
    return failure.fault("engine", f"{advice}; for the node: {nodes}")


def graph_fault(walk: MeasuredWalk, graphs: Graphs) -> FoundFault | None:
    """Return the fault of the first graph over tolerance; None without one."""
    failure = walk.first_failure("pytorch")
    if failure is None:
        return None
    path = graphs.graph(failure.stage.graph).path
    return failure.fault(
        "graph",
        f"{path}: delete it and export again; where it comes out the same, the export of this block is wrong, in "
        "lockstep.export or in the modules of transformers that it traces",
    )
