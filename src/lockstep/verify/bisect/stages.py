"""Run the stages of an assembly along one token sequence.

Graphs and tokens in, each stage with its inputs, its outputs and what is expected of them out.

A stage is one call of one graph: the embedding, the block before each attention, the attention itself (three phases),
the exit. Whoever compares stages runs them on the inputs given here, so that an error shows in the stage that makes
it and in no later one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import BoundBlock
from lockstep.artifacts.bisect_report import MeasuredOutput
from lockstep.errors import CheckError
from lockstep.onnx_tools.metrics import difference, error_scale
from lockstep.targets import Tolerances
from lockstep.verify.graphs import Graphs, stale_cache
from lockstep.verify.metrics import finite
from lockstep.verify.noise import block_bound, row_scale, spread

Arrays = dict[str, np.ndarray]
Past = tuple[np.ndarray, np.ndarray]  # keys and values [num_tokens, num_kv_heads, head_dim]
_DECODED = 4  # rows that go through decode where the sequence has no tokens behind its prompt


@dataclass(frozen=True)
class Tokens:
    """A request: ids [num_tokens] int64, the first `num_prompt` of them its prompt."""

    ids: np.ndarray
    num_prompt: int


@dataclass(frozen=True)
class Stage:
    """One call of a graph.

    part: embedding, block, attention or exit. graph: a class, or `<variant>.prefill`, `<variant>.decode`.

    phase: of an attention, prefill (the whole sequence in one piece), chunked (its second half behind the first) or
    decode (one row a request). layer: the one whose attention this is or comes before; the last for the exit, None
    for the embedding. slots: {slot: tensors}. positions [rows]: of the token that each row of the outputs belongs to.
    """

    part: str
    graph: str
    phase: str
    layer: int | None
    slots: Mapping[str, Sequence[str]]
    inputs: Arrays
    positions: np.ndarray

    @property
    def name(self) -> tuple[str, str, str, int | None]:
        """Return (part, graph, phase, layer), as reports have it."""
        return self.part, self.graph, self.phase, self.layer


@dataclass(frozen=True)
class StageRun:
    """A stage that was run.

    What its graph gave, and what PyTorch has for some of the outputs, exact and in fp16 (none without a record).
    """

    stage: Stage
    outputs: Arrays
    expected: Arrays
    noisy: Arrays


def walk(
    graphs: Graphs, tokens: Tokens, record: Any = None, noisy: Any = None, decode_rows: int = 16
) -> Iterator[StageRun]:
    """Run every stage once along the tokens, in the order of the model.

    record: what PyTorch computed (`validate.torch_trace.Record` of the same ids): each stage then gets what PyTorch
    had there. Without one it gets what the graphs before it gave. noisy: the same in fp16 (`TorchModel.noisy`), with a
    record. decode_rows: requests that a decode call takes.
    """
    positions = np.arange(len(tokens.ids), dtype=np.int64)
    env: Arrays = {"token_ids": tokens.ids, "position_ids": positions, "logit_rows": positions}

    def run(
        part: str, block: BoundBlock, layer: int | None, output: str, of: Callable[[Any], np.ndarray] | None
    ) -> StageRun:
        """Run a stage. output, of: one that PyTorch has, and where it stands in a record; None: it has none."""
        inputs = _inputs(graphs, block.graph, {**env, **graphs.adapter_inputs(block, env)})
        stage = Stage(part, block.graph, "", layer, block.slots, inputs, positions)
        exact, rounded = ({output: of(side)} if side and of else {} for side in (record, noisy))
        return StageRun(stage, _run(graphs, stage), exact, rounded)

    step = run("embedding", graphs.embedding, None, "hidden", lambda side: side.embedded)
    yield step
    env["hidden"] = step.expected.get("hidden", step.outputs["hidden"]).astype(graphs.hidden_dtype)
    for index, layer in enumerate(graphs.layers):
        # One value crosses to the next block in most models: the hidden state, which PyTorch shows. Of others only
        # their effect is seen.
        shown = record and index and graphs.shows_hidden(layer.block)
        of = (lambda side, index=index: side.layers[index].hidden) if shown else None
        step = run("block", layer.block, index, "hidden_out", of)
        yield step
        env |= {name.removesuffix("_out"): value for name, value in step.outputs.items()}
        if shown:
            env["hidden"] = record.layers[index].hidden.astype(graphs.hidden_dtype)
        exact, rounded = (side.layers[index] if side else None for side in (record, noisy))
        if layer.variant in graphs.assembly.state_mixers:
            env["attention"] = yield from _state(graphs, layer.variant, index, env, len(tokens.ids), exact, rounded)
            continue
        env["attention"] = yield from _attention(graphs, layer.variant, index, env, tokens, exact, rounded, decode_rows)
    yield run("exit", graphs.exit, graphs.num_layers - 1, "logits", lambda side: side.logits)


def _inputs(graphs: Graphs, name: str, env: Arrays) -> Arrays:
    return {io.name: env[io.name] for io in graphs.graph(name).inputs if io.name in env}


def _run(graphs: Graphs, stage: Stage) -> Arrays:
    return graphs.run_graph(stage.graph, stage.inputs, graphs.weights_of(stage.graph, stage.slots))


def _attention(
    graphs: Graphs, variant: str, index: int, env: Arrays, tokens: Tokens, layer: Any, noisy: Any, decode_rows: int
) -> Generator[StageRun, None, np.ndarray]:
    """Run the three phases of a layer's attention.

    Returns the attention [num_tokens, num_heads*head_dim] that the next block reads.
    """
    count = len(tokens.ids)
    known, rounded = (
        {} if side is None else {"key_out": side.keys, "value_out": side.values, "attention": side.attention}
        for side in (layer, noisy)
    )

    def run(phase: str, graph: str, rows: np.ndarray, pasts: Sequence[Past], lengths: Sequence[int]) -> StageRun:
        name = f"{variant}.{graph}"
        past = stale_cache(pasts, lengths, graphs.dtype)
        taken = {key: env[key][rows] for key in ("query", "key", "value", "position_ids")}
        stage = Stage("attention", name, phase, index, {}, _inputs(graphs, name, {**taken, **past}), rows)
        exact, in_fp16 = ({key: values[rows] for key, values in side.items()} for side in (known, rounded))
        return StageRun(stage, _run(graphs, stage), exact, in_fp16)

    spec = graphs.assembly.variants[variant]
    empty = [np.empty((0, spec.num_kv_heads, dim), graphs.dtype) for dim in (spec.head_dim, spec.value_head_dim)]
    whole = run("prefill", "prefill", np.arange(count), [(empty[0], empty[1])], [0])  # no past
    yield whole
    past = known.get("key_out", whole.outputs["key_out"]), known.get("value_out", whole.outputs["value_out"])
    attention = whole.outputs["attention"].copy()
    if half := count // 2:
        yield run("chunked", "prefill", np.arange(half, count), [past], [half])
    first = tokens.num_prompt
    if first == 1:  # it goes through decode too, as it does when it is served
        first = 0
    elif first >= count:
        first = max(count - _DECODED, 0)
    for start in range(first, count, decode_rows):
        rows = np.arange(start, min(start + decode_rows, count))
        decoded = run("decode", "decode", rows, [past] * len(rows), rows.tolist())
        yield decoded
        attention[rows] = decoded.outputs["attention"]
    return (attention if layer is None else layer.attention).astype(graphs.dtype)


def _state(
    graphs: Graphs, name: str, index: int, env: Arrays, count: int, layer: Any, noisy: Any
) -> Generator[StageRun, None, np.ndarray]:
    """Run a mixer with a state: the whole sequence and, where its states are known, its second half and last token.

    Returns what the next block reads, [num_tokens, size].
    """
    mixer = graphs.assembly.state_mixers[name]

    def run(phase: str, graph: str, start: int, end: int, state: np.ndarray) -> StageRun:
        rows = np.arange(start, end)
        inputs = {**{key: env[key][rows] for key in mixer.inputs}, "past_state": state}
        stage = Stage("attention", f"{name}.{graph}", phase, index, {}, inputs, rows)
        exact, in_fp16 = (
            {} if side is None else {"attention": side.attention[rows], "state_out": side.states[end]}
            for side in (layer, noisy)
        )
        return StageRun(stage, _run(graphs, stage), exact, in_fp16)

    whole = run("prefill", "prefill", 0, count, np.zeros((1, *mixer.state), np.float32))
    yield whole
    if layer is None:
        return whole.outputs["attention"]
    if half := count // 2:
        yield run("chunked", "prefill", half, count, layer.states[half])
    yield run("decode", "decode", count - 1, count, layer.states[count - 1])
    return layer.attention.astype(graphs.mixed_dtype(name))


def measure(
    stage: Stage,
    tensor: str,
    against: str,
    expected: np.ndarray,
    found: np.ndarray,
    tolerance: Tolerances,
    noisy: np.ndarray | None = None,
) -> MeasuredOutput:
    """Compare an output with what is expected of it.

    Logits absolutely where tolerance.logits is a number. All else relative to the size of the values: as
    `validate` does where there is `noisy`, what fp16 gives in place of `expected`; else as `compare` does.

    Raises CheckError for an output of another shape.
    """
    if expected.shape != found.shape:
        raise CheckError(
            f"{stage.part} ({stage.graph}) of layer {stage.layer}: {tensor}: expected shape {list(expected.shape)}, "
            f"found {list(found.shape)}; export and build again"
        )
    error = difference(expected, found)
    exact, other = (np.asarray(array, np.float64).reshape(len(array), -1) for array in (expected, found))
    if tensor == "logits" and tolerance.logits is not None:
        bound, unit = tolerance.logits, np.ones(1)
        passed = error.within(bound)
    elif noisy is not None:
        allowed = block_bound(spread(expected, noisy), tolerance)
        bound, unit, passed = allowed.largest, row_scale(exact), spread(expected, found).within(allowed)
    else:
        bound, unit = tolerance.beside_graph, error_scale(exact)
        passed = error.within_scaled(bound)
    with np.errstate(invalid="ignore", divide="ignore"):
        rows = np.nan_to_num((np.abs(exact - other) / unit).max(-1), nan=np.inf)
    over = np.flatnonzero(rows > bound)
    position = int(stage.positions[over[0] if len(over) else rows.argmax()])
    errors = finite(error.max_abs_error), finite(error.relative_error)
    return MeasuredOutput(*stage.name, tensor, against, *errors, bound, passed, position)
