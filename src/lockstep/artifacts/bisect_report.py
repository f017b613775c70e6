"""The report of `lockstep bisect`, JSON in and out. An error of None is not finite: NaN or infinity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document


@dataclass(frozen=True)
class StageName:
    """One call of a graph: see `verify.walk.Stage`."""

    part: str
    graph: str
    phase: str
    layer: int | None

    @property
    def stage(self) -> tuple[str, str, str, int | None]:
        return self.part, self.graph, self.phase, self.layer


@dataclass(frozen=True)
class MeasuredOutput(StageName):
    """How far an output of a stage is off.

    against: "pytorch" (the graph's error), "graph" (the engine's) or "reference". Two more parts are the logits
    of all steps: "runtime", of lockstep.runtime against the graphs, and "weights", of PyTorch on the target's weights
    against the reference. position: of the first token whose row is over tolerance, of the row with the largest error
    where none is.
    """

    tensor: str
    against: str
    max_abs_error: float | None
    relative_error: float | None
    tolerance: float
    passed: bool
    position: int


@dataclass(frozen=True)
class FoundFault(StageName):
    """A graph or an engine that is off: the stage that is to blame.

    wrong: "graph" (against PyTorch) or "engine" (against its graph). measured: the output by which it shows first.
    error_before: the largest of the stage before. look_at: what to do next, one sentence.
    """

    wrong: str
    measured: MeasuredOutput
    error_before: float | None
    look_at: str

    @property
    def decoder_layer(self) -> int | None:
        """Return the faulty layer: a block's `hidden_out` belongs to the layer before."""
        ends_layer = self.part == "block" and self.measured.tensor == "hidden_out"
        if self.layer and ends_layer:
            return self.layer - 1
        return self.layer


@dataclass(frozen=True)
class BisectReport(Document):
    """What a target's graphs and engines do along one request.

    chosen: why this prompt. wrong: "graph", "engine", "overflow", "weights", "runtime" or "nothing". answer: the same
    as a sentence; look_at: what to do next.
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
    rows: tuple[MeasuredOutput, ...]
    notes: tuple[str, ...]
