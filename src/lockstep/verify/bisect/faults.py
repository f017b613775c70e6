"""Find the fault of a graph or an engine, from the stages that were measured.

Measurements in, what is wrong, where, and what to look at out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from lockstep.artifacts.bisect_report import FoundFault
from lockstep.backends import build
from lockstep.verify.bisect.nodes import first_fault
from lockstep.verify.bisect.walked import Engines, Walked
from lockstep.verify.graphs import Graphs
from lockstep.verify.walk import Stage
from lockstep.weights import slot_array

Slots = Mapping[str, Sequence[str]]


def engine_fault(walked: Walked, graphs: Graphs, engines: Engines, assembly_json: Path) -> FoundFault | None:
    """Find what is wrong with the first engine that is off; None where none is.

    Engines that are ONNX graphs are built again and compared node by node with what comes out. Of others the engine is
    all that can be named.
    """
    off = walked.first_off("graph")
    if off is None:
        return None
    stage = off.stage
    backend = engines.set.backend.name
    name = engines.name(off.stage.graph)
    file = engines.set.file(name)
    if file.suffix != ".onnx":
        look_at = (
            f"{file}: nodes of a {backend} engine cannot be read; lockstep stage compare runs it on each profile; "
            "build it again, or with a lower optimization_level"
        )
        return off.fault("engine", look_at)
    slots = engines.set.slots(name)
    tensors = engines.set.tensors(name, stage.slots)
    weights = {slot.name: slot_array(graphs.weights, tensors[slot.name], slot.sizes) for slot in slots}
    feeds = {**stage.inputs, **weights}
    suspect = onnx.load(file)
    precision = graphs.assembly.precision
    with tempfile.TemporaryDirectory() as folder:
        again = build(assembly_json, backend, Path(folder) / "engines.json", engines.set.manifest.options)
        right = (again.parent / file.name).read_bytes()
    if right != file.read_bytes():
        node = first_fault(suspect, onnx.ModelProto.FromString(right), (feeds, feeds), precision, off.outputs)
        return off.fault(
            "engine", f"{file} is not what its graph builds to: delete it and build the engines again", node
        )
    both = feeds, graphs.feeds(stage.graph, stage.inputs, stage.slots)
    node = first_fault(suspect, graphs.graph(stage.graph).computed, both, precision, off.outputs, same_nodes=False)
    look_at = (
        f"{file} is what {backend} makes of its graph: build with a lower optimization_level, and report the node to "
        "its library"
    )
    return off.fault("engine", look_at, node)


def graph_fault(walked: Walked, graphs: Graphs, clean: Graphs | str, folder: Path) -> FoundFault | None:
    """Find what is wrong with the first graph that is off. clean: the graphs as an export gives them now."""
    off = walked.first_off("pytorch")
    if off is None:
        return None
    if isinstance(clean, str):
        look_at = f"the model cannot be exported again to compare with ({clean}): no node can be named"
        return off.fault("graph", look_at)
    for stage in off.stages:
        name, slots = _part(clean, stage)
        suspect = graphs.graph(stage.graph).computed
        right = clean.graph(name).computed
        feeds = graphs.feeds(stage.graph, stage.inputs, stage.slots), clean.feeds(name, stage.inputs, slots)
        outputs = [off.row.tensor] if stage is off.stage else [value.name for value in suspect.graph.output]
        if node := first_fault(suspect, right, feeds, graphs.assembly.precision, outputs):
            look_at = f"{graphs.graph(stage.graph).path} is not what an export gives now: delete it and export again"
            for slot, tensors in stage.slots.items():
                if list(tensors) != list(slots.get(slot, ())):
                    expected, found = (" + ".join(names) or "none" for names in (slots.get(slot, ()), tensors))
                    place = f"layer {stage.layer}, {stage.part} ({stage.graph})"
                    look_at = (
                        f"{folder / 'assembly.json'}: {place}, slot {slot}: expected {expected}, found {found}; export "
                        "again"
                    )
                    break
            return off.fault("graph", look_at, node, stage)
    look_at = (
        "the graphs are what an export gives now: the export itself is wrong about this block (no node can be named), "
        "in lockstep.export or in what it traces of transformers"
    )
    return off.fault("graph", look_at)


def _part(graphs: Graphs, stage: Stage) -> tuple[str, Slots]:
    """Return the (graph, slots) that an assembly has in the place of `stage`."""
    if stage.layer is None:
        return graphs.embedding.graph, graphs.embedding.slots
    layer = graphs.layers[stage.layer]
    if stage.part == "attention":
        return f"{layer.variant}.{stage.graph.rpartition('.')[2]}", {}
    part = layer.block if stage.part == "block" else graphs.exit
    return part.graph, part.slots
