"""Find the fault of a graph or an engine, from the stages that were measured.

Measurements in, what is wrong, where, and what to look at out.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lockstep.backends import build
from lockstep.onnx_tools.overflow import find_overflow, overflows
from lockstep.targets import Tolerances
from lockstep.verify.bisect.engines import Engines
from lockstep.verify.bisect.nodes import NodeFault, first_fault
from lockstep.verify.bisect.stages import Graphs, Measured, Stage, StageRun, Tokens, measure, walk
from lockstep.verify.metrics import largest
from lockstep.weights import slot_array

_NOWHERE = np.empty(0, np.int64)  # positions of a stage that nobody runs


@dataclass(frozen=True)
class Fault:
    """A graph or an engine that is off, and what is known of it.

    wrong: "graph" (against PyTorch) or "engine" (against its graph). measured: where it is off
    first. error_before: the largest error of the stage before that one, None where it is NaN or infinite. place: the
    stage that is to blame, which for a graph may come before the one measured. node: None where none can be named;
    look_at: what to do next, one sentence.
    """

    wrong: str
    measured: Measured
    error_before: float | None
    place: Stage
    node: NodeFault | None
    look_at: str


@dataclass
class Walked:
    """All measurements of a walk, in its order.

    suspects: against "pytorch" and "graph", the stages of the first layer that is off, up to the one that is, as far
    as that was found. finished: False where the time was over before the last stage. logits [num_tokens, vocab_size]:
    those of PyTorch where there is a record, else those that the graphs give; None where the walk did not get there.
    overflow: a line where a graph goes beyond float16; the walk ends before it.
    """

    rows: list[Measured] = field(default_factory=list)
    suspects: dict[str, list[Stage]] = field(default_factory=dict)
    finished: bool = True
    logits: np.ndarray | None = None
    overflow: str | None = None

    def first(self, against: str) -> Measured | None:
        return next((row for row in self.rows if row.against == against and not row.passed), None)

    def before(self, row: Measured) -> float | None:
        """Return the largest error of the stage before the row's, against the same."""
        earlier = []
        for other in self.rows:
            if other.stage is row.stage:
                break
            if other.against == row.against:
                earlier.append(other)
        if not earlier:
            return 0.0
        last = earlier[-1].stage
        errors = [
            other.error.max_abs_error
            for other in earlier
            if (other.stage.part, other.stage.layer) == (last.part, last.layer)
        ]
        return largest(errors)


def walk_stages(
    graphs: Graphs,
    engines: Engines | None,
    tokens: Tokens,
    tolerance: Tolerances,
    record: Any = None,
    noisy: Any = None,
    deadline: float | None = None,
) -> Walked:
    """Measure every stage: graph against PyTorch, engine against graph.

    The graph against PyTorch where there is a record (noisy: the same in fp16), the engine against the graph where
    there are engines.

    deadline: of time.monotonic(), looked at between stages.
    """
    walked = Walked()
    recent: list[Stage] = []
    rows = (engines.max_rows if engines else None) or 16
    for step in walk(graphs, tokens, record, noisy, rows):
        walked.overflow = _overflow(graphs, step)
        if walked.overflow:
            break
        recent = [stage for stage in recent if stage.layer == step.stage.layer and step.stage.part == "attention"] + [
            step.stage
        ]
        for row in _measured(step, engines, tolerance):
            walked.rows.append(row)
            if not row.passed and row.against not in walked.suspects:
                walked.suspects[row.against] = recent if row.against == "pytorch" else [step.stage]
        if step.stage.part == "exit":
            walked.logits = record.logits if record else step.outputs["logits"]
        if deadline is not None and time.monotonic() > deadline:
            walked.finished = step.stage.part == "exit"
            break
    return walked


def _overflow(graphs: Graphs, step: StageRun) -> str | None:
    stage = step.stage
    if stage.part == "attention" or not overflows(step.outputs, step.expected):
        return None
    found = find_overflow(graphs.model(stage.graph), graphs.feeds(stage.graph, stage.inputs, stage.slots))
    return found.text(stage.graph, stage.layer, graphs.assembly.residual) if found else None


def _measured(step: StageRun, engines: Engines | None, tolerance: Tolerances) -> list[Measured]:
    rows = [
        measure(step.stage, name, "pytorch", expected, step.outputs[name], tolerance, step.noisy.get(name))
        for name, expected in step.expected.items()
    ]
    found = engines.run(step.stage, step.outputs) if engines else None
    if found is not None:
        rows += [
            measure(step.stage, name, "graph", expected, found[name], tolerance)
            for name, expected in step.outputs.items()
        ]
    return rows


def engine_fault(walked: Walked, graphs: Graphs, engines: Engines, assembly_json: Path) -> Fault | None:
    """Find what is wrong with the first engine that is off; None where none is.

    Engines that are ONNX graphs are built again and compared node by node with what comes out. Of others the engine is
    all that can be named.
    """
    row = walked.first("graph")
    if row is None:
        return None
    stage, found = row.stage, lambda node, look_at: Fault("engine", row, walked.before(row), row.stage, node, look_at)
    file = engines.set.file(engines.name(stage.graph))
    backend = engines.set.backend.name
    if file.suffix != ".onnx":
        return found(
            None,
            f"{file}: nodes of a {backend} engine cannot be read; lockstep stage compare runs it on each profile; "
            "build it again, or with a lower optimization_level",
        )
    outputs = [
        other.tensor for other in walked.rows if other.stage is stage and other.against == "graph" and not other.passed
    ]
    feeds = _engine_feeds(engines, graphs, stage)
    with tempfile.TemporaryDirectory() as folder:
        again = build(assembly_json, backend, Path(folder) / "engines.json", engines.set.manifest.options)
        right = (again.parent / file.name).read_bytes()
    suspect, precision = onnx.load(file), graphs.assembly.precision
    if right != file.read_bytes():
        node = first_fault(suspect, onnx.ModelProto.FromString(right), (feeds, feeds), precision, outputs)
        return found(node, f"{file} is not what its graph builds to: delete it and build the engines again")
    node = first_fault(
        suspect,
        graphs.model(stage.graph),
        (feeds, graphs.feeds(stage.graph, stage.inputs, stage.slots)),
        precision,
        outputs,
        same_nodes=False,
    )
    return found(
        node,
        f"{file} is what {backend} makes of its graph: build with a lower optimization_level, and report the node to "
        "its library",
    )


def _engine_feeds(engines: Engines, graphs: Graphs, stage: Stage) -> dict[str, Any]:
    name = engines.name(stage.graph)
    slots, tensors = engines.set.slots(name), engines.set.tensors(name, stage.slots)
    return {**stage.inputs, **{slot.name: slot_array(graphs.weights, tensors[slot.name], slot.sizes) for slot in slots}}


def graph_fault(walked: Walked, graphs: Graphs, clean: Graphs | str, folder: Path) -> Fault | None:
    """Find what is wrong with the first graph that is off; None where none is.

    clean: the graphs as an export gives them now, or why there are none. folder: of the assembly.
    """
    row = walked.first("pytorch")
    if row is None:
        return None
    found = functools.partial(Fault, "graph", row, walked.before(row))
    if isinstance(clean, str):
        return found(
            row.stage, None, f"the model cannot be exported again to compare with ({clean}): no node can be named"
        )
    for stage in walked.suspects["pytorch"]:
        name, slots = clean.part(stage)
        suspect, right = (
            (graphs.model(stage.graph), graphs.feeds(stage.graph, stage.inputs, stage.slots)),
            (clean.model(name), clean.feeds(name, stage.inputs, slots)),
        )
        outputs = [value.name for value in suspect[0].graph.output] if stage is not row.stage else [row.tensor]
        node = first_fault(suspect[0], right[0], (suspect[1], right[1]), graphs.assembly.precision, outputs)
        if node:
            return found(stage, node, _look_at(graphs, stage, slots, folder))
    return found(
        row.stage,
        None,
        "the graphs are what an export gives now: the export itself is wrong about this block (no node can be named), "
        "in lockstep.export or in what it traces of transformers",
    )


def _look_at(graphs: Graphs, stage: Stage, right_slots: Mapping[str, Sequence[str]], folder: Path) -> str:
    wrong = [name for name in stage.slots if list(stage.slots[name]) != list(right_slots.get(name, ()))]
    if wrong:
        return f"{folder / 'assembly.json'}: {_binding(stage, wrong[0], right_slots)}; export again"
    return f"{folder / graphs.files[stage.graph].file} is not what an export gives now: delete it and export again"


def _binding(stage: Stage, slot: str, right_slots: Mapping[str, Sequence[str]]) -> str:
    expected, found = (" + ".join(slots.get(slot, ())) or "none" for slots in (right_slots, stage.slots))
    return f"{stage}, slot {slot}: expected {expected}, found {found}"


def differing(graphs: Graphs, clean: Graphs) -> list[str]:
    """List where the assembly is not what an export gives now: graphs and slots."""
    lines: dict[str, None] = {}
    places = [
        Stage("embedding", graphs.assembly.embedding.graph, None, "", graphs.assembly.embedding.slots, {}, _NOWHERE)
    ]
    for index, layer in enumerate(graphs.layers):
        places.append(Stage("block", layer.block.graph, index, "", layer.block.slots, {}, _NOWHERE))
        places += [
            Stage("attention", f"{layer.variant}.{phase}", index, phase, {}, {}, _NOWHERE)
            for phase in ("prefill", "decode")
        ]
    exit = graphs.layers[-1].exit
    places.append(Stage("exit", exit.graph, len(graphs.layers) - 1, "", exit.slots, {}, _NOWHERE))
    for place in places:
        name, slots = clean.part(place)
        if graphs.files[place.graph].sha256 != clean.files[name].sha256:
            lines.setdefault(f"{graphs.files[place.graph].file} is not what an export gives now")
        for slot in place.slots:
            if list(place.slots[slot]) != list(slots.get(slot, ())):
                lines.setdefault(_binding(place, slot, slots))
    return list(lines)
