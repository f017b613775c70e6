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
import onnx

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.metrics import Difference, difference, error_scale
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened, widened_dtype
from lockstep.step.network import layer_count
from lockstep.targets import Tolerances
from lockstep.verify.noise import block_bound, row_scale, spread
from lockstep.weights import Weights, check_slots, slot_array

Arrays = dict[str, np.ndarray]
_STALE = 300.0  # in cache rows that no token has filled: what a mask must hide, yet finite and within the range of fp16
_SPARE = 3  # such rows behind the longest request
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
    layer: int | None
    phase: str
    slots: Mapping[str, Sequence[str]]
    inputs: Arrays
    positions: np.ndarray

    def __str__(self) -> str:
        where = {"embedding": "the embedding", "exit": "the exit, behind the last attention"}.get(
            self.part, f"layer {self.layer}, {self.part}"
        )
        return f"{where} ({self.graph})" if not self.phase else f"{where} ({self.graph}, {self.phase})"


class Graphs:
    """The graphs of an assembly as they are written, in ONNX Runtime.

    Graphs in bf16 are computed in fp32. Weights are read from the mapped files at each call.
    """

    def __init__(
        self,
        assembly: Assembly,
        read: Callable[[GraphFile], bytes],
        weights: Weights,
        layers: int | str,
        threads: int | None = None,
    ):
        """Check that assembly, weights and layer count fit together.

        read: the bytes of a graph of the assembly. layers: the model is cut after so many, or "all".

        Raises InputError for weights of another precision, tensors that do not fit and a layer count that the model
        does not have.
        """
        self.assembly, self.weights = assembly, weights
        self._read, self._threads = read, threads
        if weights.precision != assembly.precision:
            raise InputError(
                f"{weights.manifest_path}: precision: expected {assembly.precision}, found {weights.precision}; "
                "give the weights of this precision"
            )
        if assembly.tensor_parallel is not None:
            raise InputError(
                f"bisect: expected a model of one rank, found tensor_parallel: {assembly.tensor_parallel.degree}; "
                "bisect the same model without it: what validate says names the layer of a difference of ranks"
            )
        self.layers = assembly.layers[: layer_count(assembly, layers)]
        self.dtype = np.dtype(widened_dtype(assembly.dtype))
        self.hidden_dtype = np.dtype(widened_dtype(assembly.hidden_dtype))
        self.files = dict(assembly.graphs())
        for part in (assembly.embedding, *(layer.block for layer in self.layers), self.layers[-1].exit):
            check_slots(weights, part.slots, self.files[part.graph].signature.slots, part.graph)
        self._models: dict[str, onnx.ModelProto] = {}
        self._sessions: dict[str, Any] = {}
        self._places: dict[str, Arrays] = {}

    def model(self, name: str) -> onnx.ModelProto:
        """Return the graph as it is computed: float32 where it has bfloat16."""
        if name not in self._models:
            self._models[name] = widened(onnx.ModelProto.FromString(self._read(self.files[name])))
        return self._models[name]

    def part(self, stage: Stage) -> tuple[str, Mapping[str, Sequence[str]]]:
        """Return the (graph, slots) that this assembly has in the place of `stage`."""
        if stage.part == "embedding":
            return self.assembly.embedding.graph, self.assembly.embedding.slots
        assert stage.layer is not None  # of the embedding only
        layer = self.layers[stage.layer]
        if stage.part == "attention":
            return f"{layer.variant}.{stage.graph.rpartition('.')[2]}", {}
        part = layer.block if stage.part == "block" else layer.exit
        return part.graph, part.slots

    def no_adapter(self, name: str, count: int) -> Arrays:
        """Return what a block reads of adapters for tokens that have none.

        count: of these tokens. Numbers lie in all places; no such token may see them. Nothing for a block without
        adapters.
        """
        adapters = self.assembly.adapters
        if adapters is None or name not in adapters.classes:
            return {}
        if name not in self._places:
            random = np.random.default_rng(0)
            self._places[name] = {
                key: random.standard_normal(shape, np.float32).astype(self.dtype)
                for key, shape in adapters.shapes(name)
            }
        return {**self._places[name], IDS: np.full(count, -1, np.int64)}

    def feeds(self, name: str, inputs: Mapping[str, np.ndarray], slots: Mapping[str, Sequence[str]]) -> Arrays:
        """Return all that the graph reads: its inputs and its weights.

        Raises CheckError where an input is missing.
        """
        signature = self.files[name].signature
        missing = [io.name for io in signature.inputs if io.name not in inputs]
        if missing:
            raise CheckError(
                f"graph {name}: expected inputs that a decoder step has ({', '.join(sorted(inputs))}), "
                f"found {', '.join(missing)}; export again"
            )
        weights = {
            slot.name: slot_array(self.weights, slots[slot.name], slot.sizes).astype(
                widened_dtype(slot.dtype), copy=False
            )
            for slot in signature.slots
        }
        return {io.name: inputs[io.name] for io in signature.inputs} | weights

    def run(self, name: str, inputs: Mapping[str, np.ndarray], slots: Mapping[str, Sequence[str]]) -> Arrays:
        """Run the graph; outputs by name. Raises CheckError where that fails."""
        feeds = self.feeds(name, inputs, slots)
        if name not in self._sessions:
            self._sessions[name] = open_session(self.model(name).SerializeToString(), self._threads)
        outputs = [io.name for io in self.files[name].signature.outputs]
        try:
            return dict(zip(outputs, self._sessions[name].run(outputs, feeds), strict=True))
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise CheckError(f"graph {name}: ONNX Runtime cannot run it: {' '.join(str(error).split())}") from error


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
    count = len(tokens.ids)
    positions = np.arange(count, dtype=np.int64)
    env: Arrays = {"token_ids": tokens.ids, "position_ids": positions, "logit_rows": positions}

    def run(
        part: str,
        graph: str,
        layer: int | None,
        slots: Mapping[str, Sequence[str]],
        name: str,
        of: Callable[[Any], np.ndarray] | None,
    ) -> StageRun:
        """Run a stage. name, of: an output that PyTorch has, and where it stands in a record; None: it has none."""
        known = {**env, **graphs.no_adapter(graph, count)}
        inputs = {io.name: known[io.name] for io in graphs.files[graph].signature.inputs if io.name in known}
        stage = Stage(part, graph, layer, "", slots, inputs, positions)
        exact, rounded = ({name: of(side)} if side and of else {} for side in (record, noisy))
        return StageRun(stage, graphs.run(graph, inputs, slots), exact, rounded)

    embedding = graphs.assembly.embedding
    step = run("embedding", embedding.graph, None, embedding.slots, "hidden", lambda side: side.embedded)
    yield step
    env["hidden"] = step.expected.get("hidden", step.outputs["hidden"]).astype(graphs.hidden_dtype)
    for index, layer in enumerate(graphs.layers):
        block = layer.block
        names = [io.name for io in graphs.files[block.graph].signature.outputs]
        # One value crosses to the next block in most models: the hidden state, which PyTorch shows. Of others only
        # their effect is seen.
        shown = record and index and [name for name in names if name.endswith("_out")] == ["hidden_out"]
        of = (lambda side, index=index: side.layers[index].hidden) if shown else None
        step = run("block", block.graph, index, block.slots, "hidden_out", of)
        yield step
        env |= {name.removesuffix("_out"): value for name, value in step.outputs.items()}
        if shown:
            env["hidden"] = record.layers[index].hidden.astype(graphs.hidden_dtype)
        env["attention"] = yield from _attention(
            graphs,
            layer.variant,
            index,
            env,
            tokens,
            record.layers[index] if record else None,
            noisy.layers[index] if noisy else None,
            decode_rows,
        )
    exit = graphs.layers[-1].exit
    yield run("exit", exit.graph, len(graphs.layers) - 1, exit.slots, "logits", lambda side: side.logits)


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

    def run(phase: str, graph: str, rows: np.ndarray, past: Arrays) -> StageRun:
        name = f"{variant}.{graph}"
        given = {**{key: env[key][rows] for key in ("query", "key", "value", "position_ids")}, **past}
        inputs = {io.name: given[io.name] for io in graphs.files[name].signature.inputs if io.name in given}
        stage = Stage("attention", name, index, phase, {}, inputs, rows)
        exact, in_fp16 = ({key: values[rows] for key, values in side.items()} for side in (known, rounded))
        return StageRun(stage, graphs.run(name, inputs, {}), exact, in_fp16)

    spec = graphs.assembly.variants[variant]
    shapes = [(spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.value_head_dim)]

    def cached(keys: np.ndarray, values: np.ndarray, lengths: Sequence[int]) -> Arrays:
        return _past([keys, values], shapes, lengths, graphs.dtype)

    no_keys, no_values = (np.empty((0, *shape), graphs.dtype) for shape in shapes)
    whole = run("prefill", "prefill", np.arange(count), cached(no_keys, no_values, [0]))
    yield whole
    keys, values = (known.get(name, whole.outputs[name]) for name in ("key_out", "value_out"))
    attention = whole.outputs["attention"].copy()
    if half := count // 2:
        yield run("chunked", "prefill", np.arange(half, count), cached(keys, values, [half]))
    first = tokens.num_prompt
    if first == 1:  # it goes through decode too, as it does when it is served
        first = 0
    elif first >= count:
        first = max(count - _DECODED, 0)
    for start in range(first, count, decode_rows):
        rows = np.arange(start, min(start + decode_rows, count))
        decoded = run("decode", "decode", rows, cached(keys, values, rows.tolist()))
        yield decoded
        attention[rows] = decoded.outputs["attention"]
    return (attention if layer is None else layer.attention).astype(graphs.dtype)


def _past(
    caches: Sequence[np.ndarray], shapes: Sequence[tuple[int, int]], lengths: Sequence[int], dtype: np.dtype
) -> Arrays:
    """Make a cache with the first `lengths[r]` rows for each request r.

    caches: keys and values [num_tokens, num_kv_heads, head_dim]. Behind those rows lie stale numbers.
    """
    made = {}
    for name, rows, (heads, dim) in zip(("past_key", "past_value"), caches, shapes, strict=True):
        cache = made[name] = np.full((len(lengths), heads, max(lengths) + _SPARE, dim), _STALE, dtype)
        for request, length in enumerate(lengths):
            cache[request, :, :length] = rows[:length].swapaxes(0, 1)
    return {**made, "past_lengths": np.array(lengths, np.int64)}


@dataclass(frozen=True)
class Measured:
    """How far one output of a stage is off.

    against: "pytorch" (the graph's error) or "graph" (the engine's error). position: of the first token whose row is
    over tolerance, of the row with the largest error where none is.
    """

    stage: Stage
    tensor: str
    against: str
    error: Difference
    tolerance: float
    passed: bool
    position: int


def measure(
    stage: Stage,
    tensor: str,
    against: str,
    expected: np.ndarray,
    found: np.ndarray,
    tolerance: Tolerances,
    noisy: np.ndarray | None = None,
) -> Measured:
    """Compare an output with what is expected of it.

    Logits absolutely where tolerance.logits is a number. All else relative to the size of the values: as
    `validate` does where there is `noisy`, what fp16 gives in place of `expected`; else as `compare` does.

    Raises CheckError for an output of another shape.
    """
    if expected.shape != found.shape:
        raise CheckError(
            f"{stage}: {tensor}: expected shape {list(expected.shape)}, found {list(found.shape)}; "
            "export and build again"
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
    return Measured(
        stage, tensor, against, error, bound, passed, int(stage.positions[over[0] if len(over) else rows.argmax()])
    )
