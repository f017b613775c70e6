"""Find the fault of a graph or an engine, from the stages that were measured.

Measurements in, what is wrong, where, and what to look at out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lockstep.artifacts.bisect_report import FaultMeasured, FaultNode, FoundFault, MeasuredOutput
from lockstep.backends import build
from lockstep.targets import Tolerances
from lockstep.verify.bisect.engines import Engines
from lockstep.verify.bisect.measure import measure
from lockstep.verify.bisect.nodes import first_fault
from lockstep.verify.graphs import Graphs
from lockstep.verify.metrics import largest
from lockstep.verify.walk import Stage, StageRun, Tokens, Walk
from lockstep.weights import slot_array

Slots = Mapping[str, Sequence[str]]


@dataclass
class Walked:
    """All measurements of a walk, in its order, each with its stage.

    suspects: against "pytorch" and "graph", the stages of the first layer that is off, up to the one that is, as far
    as that was found. finished: False where the time was over before the last stage. logits [num_tokens, vocab_size]:
    those of PyTorch where there is a record, else those that the graphs give; None where the walk did not get there.
    overflow: a line where a graph goes beyond float16; the walk ends before it.
    """

    measured: list[tuple[Stage, MeasuredOutput]] = field(default_factory=list)
    suspects: dict[str, list[Stage]] = field(default_factory=dict)
    finished: bool = True
    logits: np.ndarray | None = None
    overflow: str = ""

    @property
    def rows(self) -> tuple[MeasuredOutput, ...]:
        return tuple(row for _, row in self.measured)

    def first(self, against: str) -> tuple[Stage, MeasuredOutput] | None:
        """Return the first stage that is off, and its output."""
        return next((pair for pair in self.measured if pair[1].against == against and not pair[1].passed), None)

    def error_before(self, stage: Stage, against: str) -> float | None:
        """Return the largest error of the stage before `stage`, against the same; None where it is not finite."""
        earlier: list[MeasuredOutput] = []
        for other, row in self.measured:
            if other is stage:
                break
            if row.against == against:
                earlier.append(row)
        last = earlier[-1:]
        return largest([row.max_abs_error for row in earlier if (row.part, row.layer) == (last[0].part, last[0].layer)])


def walk_stages(
    graphs: Graphs, engines: Engines | None, tokens: Tokens, tolerance: Tolerances, deadline: float | None = None
) -> Walked:
    """Measure each stage. deadline: of time.monotonic(), looked at between stages."""
    walked = Walked()
    recent: list[Stage] = []
    rows = (engines.max_rows if engines else None) or 16
    for step in Walk(graphs, [tokens], decode_rows=rows):
        stage = step.stage
        walked.overflow = step.overflow(graphs)
        if walked.overflow:
            break
        recent = [other for other in recent if other.layer == stage.layer and stage.part == "attention"] + [stage]
        for row in _measured(step, engines, tolerance):
            walked.measured.append((stage, row))
            if not row.passed and row.against not in walked.suspects:
                walked.suspects[row.against] = recent if row.against == "pytorch" else [stage]
        if stage.part == "exit":
            walked.logits = tokens.record.logits if tokens.record else step.outputs["logits"]
        if deadline is not None and time.monotonic() > deadline:
            walked.finished = stage.part == "exit"
            break
    return walked


def _measured(step: StageRun, engines: Engines | None, tolerance: Tolerances) -> list[MeasuredOutput]:
    rows = [
        measure(step.stage, name, "pytorch", expected, step.outputs[name], tolerance, step.noisy.get(name))
        for name, expected in step.expected.items()
    ]
    outputs = engines.run(step.stage, step.outputs) if engines else None
    if outputs is not None:
        rows += [
            measure(step.stage, name, "graph", expected, outputs[name], tolerance)
            for name, expected in step.outputs.items()
        ]
    return rows


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
    outputs = [
        row.tensor for other, row in walked.measured if other is stage and row.against == "graph" and not row.passed
    ]
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
    for stage in walked.suspects["pytorch"]:
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


def differing(graphs: Graphs, clean: Graphs) -> list[str]:
    """List where the assembly is not what an export gives now: graphs and slots."""
    lines: dict[str, None] = {}
    for (place, name, slots), (_, right, right_slots) in zip(_bound(graphs), _bound(clean)):
        if graphs.graph(name).sha256 != clean.graph(right).sha256:
            lines.setdefault(f"{graphs.graph(name).path.name} is not what an export gives now")
        for line in _bindings(slots, right_slots):
            lines.setdefault(f"{place}, {line}")
    return list(lines)


def _bound(graphs: Graphs) -> Iterator[tuple[str, str, Slots]]:
    """Yield (place, graph, slots) of each graph in the order of the model."""
    yield _place("embedding", graphs.embedding.graph, "", None), graphs.embedding.graph, graphs.embedding.slots
    for index, layer in enumerate(graphs.layers):
        yield _place("block", layer.block.graph, "", index), layer.block.graph, layer.block.slots
        for phase in ("prefill", "decode"):
            yield "", f"{layer.variant}.{phase}", {}
    yield _place("exit", graphs.exit.graph, "", None), graphs.exit.graph, graphs.exit.slots
