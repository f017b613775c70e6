"""The report of `lockstep bisect`.

All measurements, and each graph or engine that is off. JSON in and out. An error of None is not finite: NaN or
infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document, JsonObject


@dataclass(frozen=True)
class StageName:
    """One call of a graph: see `verify.walk.Stage`."""

    part: str
    graph: str
    phase: str
    layer: int | None

    @property
    def stage(self) -> tuple[str, str, str, int | None]:
        """Return (part, graph, phase, layer)."""
        return self.part, self.graph, self.phase, self.layer


@dataclass(frozen=True)
class MeasuredOutput(StageName):
    """How far an output of a stage is off.

    against: "pytorch" (the graph's error) or "graph" (the engine's error). position: of the first token whose row is
    over tolerance, of the row with the largest error where none is.
    """

    tensor: str
    against: str
    max_abs_error: float | None
    relative_error: float | None
    tolerance: float
    passed: bool
    position: int


@dataclass(frozen=True)
class FaultMeasured(StageName):
    """Where the output by which a fault shows is off first, and the largest error of the stage before."""

    tensor: str
    position: int
    error_before: float | None
    error_after: float | None
    tolerance: float


@dataclass(frozen=True)
class FaultNode:
    """The node that is at fault: see `verify.bisect.nodes.NodeFault`."""

    name: str
    operator: str
    output: str
    error_before: float | None
    error_after: float | None
    reason: str
    others: int


@dataclass(frozen=True)
class FoundFault:
    """A graph or an engine that is off.

    wrong: "graph" (against PyTorch) or "engine" (against its graph). layer: the decoder layer that the fault lies in,
    None for the embedding; block_layer: the layer of the stage that is to blame. node: None where none can be named.
    look_at: what to do next, one sentence.
    """

    wrong: str
    layer: int | None
    part: str
    graph: str
    phase: str
    block_layer: int | None
    node: FaultNode | None
    look_at: str
    measured: FaultMeasured


@dataclass(frozen=True)
class StepsError:
    """How far the logits behind a request's steps are off.

    position: of the first step over tolerance, of the one with the largest error where none is.
    """

    max_abs_error: float | None
    tolerance: float
    passed: bool
    position: int


@dataclass(frozen=True)
class EngineReport(JsonObject):
    """Engines against their graphs.

    served: how far the runtime's logits are off, None where that was not measured. finished: False where the time was
    over before the last stage. overflow: a line where a graph goes beyond float16.
    """

    rows: tuple[MeasuredOutput, ...]
    fault: FoundFault | None
    served: StepsError | None
    finished: bool
    overflow: str | None = None


@dataclass(frozen=True)
class BisectReport(Document):
    """What a target's graphs and engines do along one request.

    chosen: why this prompt. wrong: "graph", "engine", "overflow", "weights", "runtime" or "nothing". answer: the same
    in one line; look_at: what to do next. served, weights: how far the logits of the runtime, and those of PyTorch on
    the target's weights, are off; None where that was not measured.
    """

    FORMAT: ClassVar[str] = formats.BISECT
    target: str
    prompt: str
    chosen: str
    num_tokens: int
    num_prompt: int
    wrong: str
    answer: str
    look_at: tuple[str, ...]
    faults: tuple[FoundFault, ...]
    served: StepsError | None
    weights: StepsError | None
    rows: tuple[MeasuredOutput, ...]
    notes: tuple[str, ...]
