"""Find the fault of a graph or an engine, from the stages that were measured.

Measurements in, what is wrong, where, and what to look at out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from lockstep.artifacts.bisect_report import FaultMeasured, FaultNode, FoundFault, MeasuredOutput
from lockstep.backends import build
from lockstep.verify.bisect.nodes import first_fault
from lockstep.verify.bisect.walked import Engines, Walked
from lockstep.verify.graphs import Graphs
from lockstep.verify.walk import Stage
from lockstep.weights import slot_array

Slots = Mapping[str, Sequence[str]]


def _fault(
    wrong: str, walked: Walked, first: tuple[Stage, MeasuredOutput], place: Stage, node: FaultNode | None, look_at: str
) -> FoundFault:
    """Return a fault for the report.

    first: the stage that is off first. place: the one that is to blame, which of a graph may come before it. What
    leaves a block as `hidden_out` belongs to the layer before.
    """
    stage, row = first
    layer = place.layer
    if place.part == "block" and layer and place is stage and row.tensor == "hidden_out":
        layer -= 1
    before = walked.error_before(stage, row.against)
    measured = FaultMeasured(*stage.name, row.tensor, row.position, before, row.max_abs_error, row.tolerance)
    return FoundFault(wrong, layer, place.part, place.graph, place.phase, place.layer, node, look_at, measured)


def engine_fault(walked: Walked, graphs: Graphs, engines: Engines, assembly_json: Path) -> FoundFault | None:
    """Find what is wrong with the first engine that is off; None where none is.

    Engines that are ONNX graphs are built again and compared node by node with what comes out. Of others the engine is
    all that can be named.
    """
    first = walked.first("graph")
    if first is None:
        return None
    stage, backend = first[0], engines.set.backend.name
    file = engines.set.file(engines.name(stage.graph))
    if file.suffix != ".onnx":
        return _fault(
            "engine", walked, first, stage, None,
            f"{file}: nodes of a {backend} engine cannot be read; lockstep stage compare runs it on each profile; "
            "build it again, or with a lower optimization_level",
        )  # fmt: skip
    rows = next(rows for other, rows in walked.stages if other is stage)
    outputs = [row.tensor for row in rows if row.against == "graph" and not row.passed]
    feeds, suspect, precision = _engine_feeds(engines, graphs, stage), onnx.load(file), graphs.assembly.precision
    with tempfile.TemporaryDirectory() as folder:
        again = build(assembly_json, backend, Path(folder) / "engines.json", engines.set.manifest.options)
        right = (again.parent / file.name).read_bytes()
    if right != file.read_bytes():
        node = first_fault(suspect, onnx.ModelProto.FromString(right), (feeds, feeds), precision, outputs)
        look_at = f"{file} is not what its graph builds to: delete it and build the engines again"
        return _fault("engine", walked, first, stage, node, look_at)
    both = feeds, graphs.feeds(stage.graph, stage.inputs, stage.slots)
    node = first_fault(suspect, graphs.graph(stage.graph).computed, both, precision, outputs, same_nodes=False)
    return _fault(
        "engine", walked, first, stage, node,
        f"{file} is what {backend} makes of its graph: build with a lower optimization_level, and report the node to "
        "its library",
    )  # fmt: skip


def _engine_feeds(engines: Engines, graphs: Graphs, stage: Stage) -> dict[str, Any]:
    name = engines.name(stage.graph)
    slots, tensors = engines.set.slots(name), engines.set.tensors(name, stage.slots)
    return {**stage.inputs, **{slot.name: slot_array(graphs.weights, tensors[slot.name], slot.sizes) for slot in slots}}


def graph_fault(walked: Walked, graphs: Graphs, clean: Graphs | str, folder: Path) -> FoundFault | None:
    """Find what is wrong with the first graph that is off. clean: the graphs as an export gives them now."""
    first = walked.first("pytorch")
    if first is None:
        return None
    if isinstance(clean, str):
        look_at = f"the model cannot be exported again to compare with ({clean}): no node can be named"
        return _fault("graph", walked, first, first[0], None, look_at)
    for stage in walked.behind_attention(first[0]):
        name, slots = _part(clean, stage)
        suspect, right = graphs.graph(stage.graph).computed, clean.graph(name).computed
        feeds = graphs.feeds(stage.graph, stage.inputs, stage.slots), clean.feeds(name, stage.inputs, slots)
        outputs = [first[1].tensor] if stage is first[0] else [value.name for value in suspect.graph.output]
        if node := first_fault(suspect, right, feeds, graphs.assembly.precision, outputs):
            path = graphs.graph(stage.graph).path
            look_at = f"{path} is not what an export gives now: delete it and export again"
            if wrong := next(_bindings(stage.slots, slots), None):
                look_at = f"{folder / 'assembly.json'}: {_place(*stage.name)}, {wrong}; export again"
            return _fault("graph", walked, first, stage, node, look_at)
    return _fault(
        "graph", walked, first, first[0], None,
        "the graphs are what an export gives now: the export itself is wrong about this block (no node can be named), "
        "in lockstep.export or in what it traces of transformers",
    )  # fmt: skip


def _part(graphs: Graphs, stage: Stage) -> tuple[str, Slots]:
    """Return the (graph, slots) that an assembly has in the place of `stage`."""
    if stage.layer is None:
        return graphs.embedding.graph, graphs.embedding.slots
    layer = graphs.layers[stage.layer]
    if stage.part == "attention":
        return f"{layer.variant}.{stage.graph.rpartition('.')[2]}", {}
    part = layer.block if stage.part == "block" else graphs.exit
    return part.graph, part.slots


def _place(part: str, graph: str, phase: str, layer: int | None) -> str:
    places = {"embedding": "the embedding", "exit": "the exit, behind the last attention"}
    return f"{places.get(part, f'layer {layer}, {part}')} ({graph}{f', {phase}' if phase else ''})"


def _bindings(slots: Slots, right: Slots) -> Iterator[str]:
    """Yield a line for each slot that is bound to other tensors than in `right`."""
    for slot, tensors in slots.items():
        if list(tensors) != list(right.get(slot, ())):
            expected, found = (" + ".join(names) or "none" for names in (right.get(slot, ()), tensors))
            yield f"slot {slot}: expected {expected}, found {found}"


def differing(walked: Walked, graphs: Graphs, clean: Graphs) -> list[str]:
    """List where the assembly is not what an export gives now: graphs and slots, as far as they were walked."""
    lines: dict[str, None] = {}
    for stage, _ in walked.stages:
        right, slots = _part(clean, stage)
        if graphs.graph(stage.graph).sha256 != clean.graph(right).sha256:
            lines[f"{graphs.graph(stage.graph).path.name} is not what an export gives now"] = None
        lines |= {f"{_place(*stage.name)}, {wrong}": None for wrong in _bindings(stage.slots, slots)}
    return list(lines)
