"""Measure each stage along a request: graphs against PyTorch, engines against graphs. Needs the engines' runtime."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.bisect_report import FoundFault, MeasuredOutput
from lockstep.backends.base import Program
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.graphs import base_engine
from lockstep.errors import CheckError
from lockstep.onnx_tools import judge
from lockstep.onnx_tools.judge import Bound, beside_noise, relative_errors, spread
from lockstep.step.executable import run_once
from lockstep.tolerances import Tolerances
from lockstep.verify.arrays import concatenate_rows
from lockstep.verify.graphs import Graphs
from lockstep.verify.metrics import largest
from lockstep.verify.noisy_graph import beside_graph, tolerances_of
from lockstep.verify.walk import Arrays, Stage, StageRun, Tokens, Walk
from lockstep.weights import Weights


class Engines:
    """The engines of a set, called one at a time; weights are bound for one call."""

    def __init__(self, engines: EngineSet, weights: Weights, threads: int | None = None):
        self.set = engines
        self._weights = weights
        self._threads = threads
        self._programs: dict[str, Program] = {}
        self._names = set(engines.names())
        # Requests, tokens and cache rows that the engines were built for; None: any number.
        self.max_rows: int | None = engines.manifest.options.get("max_batch_size")
        self._max_tokens: int | None = engines.manifest.options.get("max_num_tokens")
        self._max_cached: int | None = engines.manifest.options.get("max_seq_len")

    def name(self, graph: str) -> str:
        """Return the engine that computes a graph for tokens without adapters."""
        base = base_engine(graph)
        if base in self._names:
            return base
        return graph

    def run(self, stage: Stage, like: Mapping[str, np.ndarray]) -> Arrays | None:
        """Return the stage's outputs, in the shapes and dtypes of `like`.

        None where there is no such engine, and for an attention of more tokens than it was built for.
        """
        if self.name(stage.graph) not in self._names:
            return None
        if stage.part == "attention":
            if self._max_tokens is not None and len(stage.positions) > self._max_tokens:
                return None
            # The graphs' caches have spare rows after the tokens, more than the engine may take.
            inputs = dict(stage.inputs)
            for name in ("past_key", "past_value"):
                if name in inputs:
                    inputs[name] = inputs[name][:, :, : self._max_cached]
            return self._call(stage, inputs, like)
        # Outside attention rows are independent, so a stage of more rows than the engine takes runs in pieces. A row
        # is a token; of an exit, it is one of the tokens named by `logit_rows`.
        total = len(stage.positions)
        limits = [self._max_tokens]
        rows = np.arange(total)
        if "logit_rows" in stage.inputs:
            limits.append(self.max_rows)
            rows = stage.inputs["logit_rows"]
        max_rows = min(filter(None, limits), default=total)
        signature = self.set.assembly.classes[stage.graph].signature
        by_token = {io.name for io in signature.inputs if io.shape[:1] == ("num_tokens",)}
        calls = []
        for start in range(0, total, max_rows):
            piece = slice(start, start + max_rows)
            tokens = rows[piece]
            inputs = dict(stage.inputs)
            for name in by_token & inputs.keys():
                inputs[name] = inputs[name][tokens]
            if "logit_rows" in inputs:
                inputs["logit_rows"] = np.arange(len(tokens))
            calls.append(self._call(stage, inputs, {name: array[piece] for name, array in like.items()}))
        return concatenate_rows(calls)

    def _call(self, stage: Stage, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> Arrays:
        name = self.name(stage.graph)
        if name not in self._programs:
            self._programs[name] = self.set.load(name, self._threads)
        tensors = self.set.tensors(name, stage.slots)
        weights = None
        if stage.slots:
            weights = self._weights
        executable = self._programs[name].bind(weights, tensors)
        if name != stage.graph and (adapters := self.set.assembly.adapters):
            inputs = {key: array for key, array in inputs.items() if key not in {IDS, *adapters.names(stage.graph)}}
        return run_once(executable, inputs, like)  # a bf16 graph runs in fp32 for engines of bf16


@dataclass(frozen=True)
class FirstFailure:
    """The first output over its tolerance.

    error_before: the largest error of the stage before; None where it is not finite.
    """

    row: MeasuredOutput
    stage: Stage
    error_before: float | None

    def fault(self, wrong: str, look_at: str) -> FoundFault:
        return FoundFault(*self.stage.name, wrong, self.row, self.error_before, look_at)


@dataclass
class MeasuredWalk:
    """The stages of a walk, in its order, each with its measurements.

    finished: False where the time was over before the last stage. logits [num_tokens, vocab_size]: PyTorch's where
    there is a record, else the graphs'; None where the walk did not get there. overflow: a line where a graph exceeds
    float16; the walk ends before it.
    """

    stages: list[tuple[Stage, list[MeasuredOutput]]] = field(default_factory=list)
    finished: bool = True
    logits: np.ndarray | None = None
    overflow: str = ""

    @property
    def rows(self) -> tuple[MeasuredOutput, ...]:
        return tuple(itertools.chain.from_iterable(rows for _, rows in self.stages))

    def first_failure(self, against: str) -> FirstFailure | None:
        earlier: list[MeasuredOutput] = []
        for stage, measured in self.stages:
            rows = [row for row in measured if row.against == against]
            failed = [row for row in rows if not row.passed]
            if failed:
                # An attention before is one stage for each phase: its error is the largest of all.
                before = [row for row in earlier if (row.part, row.layer) == (earlier[-1].part, earlier[-1].layer)]
                return FirstFailure(failed[0], stage, largest([row.max_abs_error for row in before]))
            earlier += rows
        return None


def measure_walk(
    graphs: Graphs, engines: Engines | None, tokens: Tokens, tolerance: Tolerances, deadline: float = math.inf
) -> MeasuredWalk:
    """Measure each stage. deadline: of time.monotonic(), checked between stages."""
    walk = MeasuredWalk()
    decode_rows = 16
    if engines and engines.max_rows:
        decode_rows = engines.max_rows
    for run in Walk(graphs, [tokens], decode_rows=decode_rows):
        walk.overflow = run.overflow(graphs)
        if walk.overflow:
            break
        walk.stages.append((run.stage, _measure_stage(run, graphs, engines, tolerance)))
        is_last = run.stage.part == "exit"
        if is_last:
            walk.logits = run.outputs["logits"]
            if tokens.record:
                walk.logits = tokens.record.logits
        if time.monotonic() > deadline:
            walk.finished = is_last
            break
    return walk


def _measure_stage(
    run: StageRun, graphs: Graphs, engines: Engines | None, tolerance: Tolerances
) -> list[MeasuredOutput]:
    stage = run.stage
    rows = []
    for name, expected in run.expected.items():
        bound = beside_noise(tolerance, spread(expected, run.noisy[name]), len(expected))
        rows.append(measure(stage, name, "pytorch", expected, run.outputs[name], bound))
    outputs = None
    if engines is not None:
        outputs = engines.run(stage, run.outputs)
    if outputs is None:
        return rows
    graph = graphs.graph(stage.graph)
    noise = graph.noise(graphs.feeds(stage.graph, stage.inputs, stage.slots), run.outputs)
    tolerance = tolerances_of(graph.model, tolerance)
    if not stage.slots:
        tolerance = tolerance.of_attention
    for name, actual in outputs.items():
        bound = beside_graph(tolerance, noise[name])
        rows.append(measure(stage, name, "graph", run.outputs[name], actual, bound))
    return rows


def measure(
    stage: Stage,
    tensor: str,
    against: str,
    expected: np.ndarray,
    actual: np.ndarray,
    bound: Bound,
    scale: float | None = None,
) -> MeasuredOutput:
    """Compare an output with its expected value. Raises CheckError for one of another shape."""
    if expected.shape != actual.shape:
        raise CheckError(
            f"{stage.part} ({stage.graph}) of layer {stage.layer}: {tensor}: expected shape {list(expected.shape)}, "
            f"found {list(actual.shape)}; export and build again"
        )
    error = judge.measure(expected, actual, bound, scale)
    rows = np.nan_to_num(relative_errors(expected, actual, scale).max(-1), nan=np.inf)
    row = rows.argmax()
    over = rows > bound.largest
    if over.any():
        row = over.argmax()  # the first one: errors of later tokens may follow from it
    position = int(stage.positions[row])
    errors = error.max_abs_error, error.relative_error, error.tolerance
    return MeasuredOutput(*stage.name, tensor, against, *errors, judge.wrong(tensor, error) is None, position)
