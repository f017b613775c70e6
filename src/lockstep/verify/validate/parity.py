"""Errors of the graphs against torch, by layer.

The graphs of an assembly and recorded sequences in; errors by layer out.

Teacher-forced: each block and each attention gets what torch had there, so that an error shows in the layer that makes
it and in no later one. Free: the embedded tokens go in, and every graph takes what the one before gave. Sequences start
at position 0, or behind a synthetic cache of any length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.onnx_tools.metrics import Difference, difference
from lockstep.onnx_tools.overflow import overflows
from lockstep.targets import Tolerances
from lockstep.verify.graphs import Graphs, stale_cache
from lockstep.verify.metrics import off
from lockstep.verify.noise import Spread, block_bound, spread
from lockstep.verify.validate.torch_trace import LayerRecord, Record

_PIECE = 4096  # tokens of the vocabulary at a time


@dataclass
class LayerErrors:
    """Errors of one layer by tensor.

    `hidden` (what leaves the layer), then for each phase `<phase>.key_out`, `.value_out`, `.attention`; of a mixer with
    a state `<phase>.state_out`, `.attention`.
    overflow: a line where the block's graph goes beyond float16.
    """

    layer: int
    block: str
    variant: str
    tensors: dict[str, TensorErrors] = field(default_factory=dict)
    overflow: str = ""

    @property
    def where(self) -> str:
        return f"layer {self.layer} (block {self.block}, {self.variant})"


@dataclass(frozen=True)
class TensorErrors:
    """The error of a graph's output beside the noise of fp16 there, both relative to the size of each row."""

    of: Difference
    error: Spread
    noise: Spread

    @classmethod
    def measure(cls, expected: np.ndarray, found: np.ndarray, noisy: np.ndarray) -> TensorErrors:
        """Compare arrays [rows, ...]."""
        return cls(difference(expected, found), spread(expected, found), spread(expected, noisy))

    def wrong(self, name: str, tolerance: Tolerances) -> str | None:
        """Say what is wrong with the tensor; None where its error passes."""
        if name == "logits" and tolerance.logits is not None:
            within = self.of.within(tolerance.logits)
            return None if within else f"{name}: {off(self.of, tolerance.logits)}"
        bound, error = self.bound(name, tolerance), self.error
        if error.within(bound):
            return None
        if self.of.max_abs_error is None:
            return f"{name}: expected finite numbers, found NaN or infinity"
        largest, rms, cosine = f"{error.largest:.3g}", f"{error.rms:.3g}", f"{self.of.cosine:.6f}"
        if error.largest > bound.largest:
            more = f"largest absolute error {self.of.max_abs_error:.3g}, cosine {cosine}"
            return f"{name}: expected an error of at most {bound.largest:.3g}, found {largest} ({more})"
        more = f"largest {largest}, cosine {cosine}"
        return f"{name}: expected an rms error of at most {bound.rms:.3g}, found {rms} ({more})"

    def bound(self, name: str, tolerance: Tolerances) -> Spread:
        """Return the error that passes; that of logits is absolute where the config gives a number."""
        own = replace(tolerance, block=tolerance.logits) if name == "logits" else tolerance
        return block_bound(self.noise, own)


Pairs = Sequence[tuple[Record, Record]]  # what torch computed of a sequence, in float32 and in fp16
Embed = Callable[[np.ndarray], np.ndarray]


def embedding_error(graphs: Graphs, embed: Embed, noisy: Embed) -> TensorErrors:
    """Return the error of the embedding graph on the whole vocabulary, the largest of all pieces of it.

    embed, noisy: give what torch has for token ids, and that in fp16.
    """
    pieces = []
    for first in range(0, graphs.assembly.vocab_size, _PIECE):
        token_ids = np.arange(first, min(first + _PIECE, graphs.assembly.vocab_size), dtype=np.int64)
        outputs = graphs.run_block(graphs.embedding, {"token_ids": token_ids})
        pieces.append(TensorErrors.measure(embed(token_ids), outputs["hidden"], noisy(token_ids)))
    worst = max(pieces, key=lambda piece: math.inf if piece.of.max_abs_error is None else piece.error.largest)
    return replace(
        worst, noise=Spread(max(piece.noise.largest for piece in pieces), max(piece.noise.rms for piece in pieces))
    )


def layer_errors(
    graphs: Graphs, records: Pairs, adapter_ids: np.ndarray | None = None
) -> tuple[list[LayerErrors], TensorErrors]:
    """Return the errors of each layer, teacher-forced, and of the logits.

    The logits are those behind the last layer. All sequences run packed, as in a step. adapter_ids: the adapter slot of
    each token, with which torch was recorded; none by default.
    """
    errors, env = _layers_alone(graphs, records, adapter_ids=adapter_ids)
    env["logit_rows"] = np.arange(len(env["position_ids"]))
    logits = graphs.run_block(graphs.exit, env)["logits"]
    if overflows({"logits": logits}, {}):
        errors[-1].overflow = errors[-1].overflow or graphs.overflow(graphs.exit, env, graphs.num_layers - 1)
    expected, noisy = (np.concatenate([record.logits for record in side]) for side in zip(*records))
    return errors, TensorErrors.measure(expected, logits, noisy)


def errors_behind(graphs: Graphs, record: Record, noisy: Record, capacity: int) -> list[LayerErrors]:
    """Return the errors of the layers of a record that comes behind a cache.

    Teacher-forced: its tokens in one chunk (`chunked`), and each as a row of one decode step. The graphs get a cache of
    at least `capacity` rows.
    """
    return _layers_alone(graphs, [(record, noisy)], capacity)[0]


def _layers_alone(
    graphs: Graphs, pairs: Pairs, capacity: int = 0, adapter_ids: np.ndarray | None = None
) -> tuple[list[LayerErrors], dict[str, np.ndarray]]:
    """Return the errors of each layer, and what goes on from the last to the exit."""
    records, noise = ([pair[side] for pair in pairs] for side in (0, 1))
    spans = _spans(records)
    env: dict[str, np.ndarray] = {
        "hidden": _narrowed(np.concatenate([record.embedded for record in records]), graphs.hidden_dtype),
        "position_ids": np.concatenate([record.position_ids for record in records]),
    }
    if adapter_ids is not None:
        env[IDS] = adapter_ids
    errors: list[LayerErrors] = []
    for index in range(len(records[0].layers)):
        layer = graphs.layers[index]
        part = layer.block
        outputs = graphs.run_block(part, env)
        known: dict[str, np.ndarray] = {}
        if index and graphs.shows_hidden(part):
            # The hidden state that enters this layer and left the one before crosses to the next block.
            known["hidden"] = np.concatenate([record.layers[index].hidden for record in records])
            noisy = np.concatenate([record.layers[index].hidden for record in noise])
            errors[-1].tensors["hidden"] = TensorErrors.measure(known["hidden"], outputs["hidden"], noisy)
        overflow = graphs.overflow(part, env, index) if overflows(outputs, known) else ""
        env |= outputs | {name: _narrowed(array, graphs.hidden_dtype) for name, array in known.items()}
        entry = LayerErrors(records[0].layers[index].layer, part.graph, layer.variant, overflow=overflow)
        layers = [(record.layers[index], rounded.layers[index]) for record, rounded in pairs]
        if layer.variant in graphs.assembly.state_mixers:
            entry.tensors |= _state_errors(graphs, layer.variant, env, layers, spans)
        elif records[0].num_past:
            entry.tensors |= _variant_errors_behind(
                graphs, layer.variant, env, *layers[0], records[0].num_past, capacity
            )
        else:
            entry.tensors |= _variant_errors(graphs, layer.variant, env, layers, spans)
        errors.append(entry)
        attention = np.concatenate([record.layers[index].attention for record in records])
        env["attention"] = _narrowed(attention, graphs.mixed_dtype(layer.variant))
    return errors, env


def _variant_errors(
    graphs: Graphs,
    variant: str,
    env: Mapping[str, np.ndarray],
    layers: Sequence[tuple[LayerRecord, LayerRecord]],
    spans: Sequence[slice],
) -> dict[str, TensorErrors]:
    """Return the errors of a layer's attention in three phases.

    Whole prompts, prompts whose second half comes behind a cache, and last tokens as one decode step.
    """
    phases = _Phases()
    for (layer, noisy), span in zip(layers, spans):
        count = span.stop - span.start
        for phase, start in (("prefill", 0), ("chunked", count // 2)):
            if phase == "chunked" and not start:
                continue  # one token cannot be halved
            past = _past(graphs, [layer], [start])
            outputs = graphs.run_mixer(variant, "prefill", {**_rows(env, slice(span.start + start, span.stop)), **past})
            rows = slice(start, count)
            phases.add(phase, outputs, _expected(layer, rows), _expected(noisy, rows))
    last = np.array([span.stop - 1 for span in spans])
    lengths = [span.stop - span.start - 1 for span in spans]
    outputs = graphs.run_mixer(
        variant, "decode", {**_rows(env, last), **_past(graphs, [layer for layer, _ in layers], lengths)}
    )
    for row, ((layer, noisy), length) in enumerate(zip(layers, lengths)):
        token = slice(length, length + 1)
        one = {name: array[row : row + 1] for name, array in outputs.items()}
        phases.add("decode", one, _expected(layer, token), _expected(noisy, token))
    return phases.errors()


def _state_errors(
    graphs: Graphs,
    name: str,
    env: Mapping[str, np.ndarray],
    layers: Sequence[tuple[LayerRecord, LayerRecord]],
    spans: Sequence[slice],
) -> dict[str, TensorErrors]:
    """Return the errors of a mixer with a state in the phases of `_variant_errors`, behind torch's states."""
    inputs, phases = graphs.assembly.state_mixers[name].inputs, _Phases()

    def run(phase: str, rows: slice | np.ndarray, states: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        return graphs.run_mixer(
            name, phase, {**{key: env[key][rows] for key in inputs}, "past_state": np.concatenate(states)}
        )

    def expected(layer: LayerRecord, start: int, end: int) -> dict[str, np.ndarray]:
        return {"state_out": layer.states[end], "attention": layer.attention[start:end]}

    for (layer, noisy), span in zip(layers, spans):
        count = span.stop - span.start
        for phase, start in (("prefill", 0), ("chunked", count // 2)):
            if start or phase == "prefill":
                outputs = run("prefill", slice(span.start + start, span.stop), [layer.states[start]])
                phases.add(phase, outputs, *(expected(side, start, count) for side in (layer, noisy)))
    lengths = [span.stop - span.start for span in spans]
    last = np.array([span.stop - 1 for span in spans])
    outputs = run("decode", last, [layer.states[count - 1] for (layer, _), count in zip(layers, lengths)])
    for row, ((layer, noisy), count) in enumerate(zip(layers, lengths)):
        one = {key: array[row : row + 1] for key, array in outputs.items()}
        phases.add("decode", one, *(expected(side, count - 1, count) for side in (layer, noisy)))
    return phases.errors()


def _variant_errors_behind(
    graphs: Graphs,
    variant: str,
    env: Mapping[str, np.ndarray],
    layer: LayerRecord,
    noisy: LayerRecord,
    num_past: int,
    capacity: int,
) -> dict[str, TensorErrors]:
    """Return the errors of a layer's attention behind a cache.

    All tokens as a chunk, and each as a request of one decode step.
    """
    rows = _rows(env, slice(None))
    query_scale = np.full(rows["query"].shape[1], layer.query_scale, np.float32)
    if (spec := graphs.assembly.variants[variant]).sinks:
        query_scale[spec.head_dim :: spec.query_dim] = 1  # what is no query's number
    scale = {"query": query_scale, "key": np.float32(layer.key_scale)}
    rows = {name: (array * scale.get(name, np.float32(1))).astype(array.dtype) for name, array in rows.items()}
    count, phases = len(rows["query"]), _Phases()
    expected, noise = (_expected(record, slice(0, count), num_past) for record in (layer, noisy))
    chunk = graphs.run_mixer(variant, "prefill", {**rows, **_past(graphs, [layer], [num_past], capacity)})
    phases.add("chunked", chunk, expected, noise)
    lengths = [num_past + token for token in range(count)]
    each = graphs.run_mixer(variant, "decode", {**rows, **_past(graphs, [layer] * count, lengths, capacity)})
    phases.add("decode", each, expected, noise)
    return phases.errors()


@np.errstate(over="ignore")
def _narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return what PyTorch gave as the graphs take it: infinite where their type ends before."""
    return array.astype(dtype)


class _Phases:
    """What a layer's attention graphs gave, what was expected, and that in fp16, by phase."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], list[tuple[np.ndarray, ...]]] = {}

    def add(
        self,
        phase: str,
        outputs: Mapping[str, np.ndarray],
        expected: Mapping[str, np.ndarray],
        noisy: Mapping[str, np.ndarray],
    ) -> None:
        for name in expected:
            rows = (side[name].reshape(len(expected[name]), -1) for side in (expected, outputs, noisy))
            self._arrays.setdefault((phase, name), []).append(tuple(rows))

    def errors(self) -> dict[str, TensorErrors]:
        """Return {"<phase>.<output>": errors}, in the order in which phases were added.

        The first phase has all rows: where noise is larger there, a phase of some of them is held to that.
        """
        errors: dict[str, TensorErrors] = {}
        usual: dict[str, Spread] = {}
        for (phase, name), arrays in self._arrays.items():
            error = TensorErrors.measure(*(np.concatenate(side) for side in zip(*arrays)))
            noise = usual.setdefault(name, error.noise)
            errors[f"{phase}.{name}"] = replace(error, noise=error.noise | noise)
        return errors


def _past(
    graphs: Graphs, layers: Sequence[LayerRecord], lengths: Sequence[int], capacity: int = 0
) -> dict[str, np.ndarray]:
    """Return a cache with torch's keys and values of each request's first tokens."""
    return stale_cache([(layer.keys, layer.values) for layer in layers], lengths, graphs.dtype, capacity)


def _expected(layer: LayerRecord, rows: slice, num_past: int = 0) -> dict[str, np.ndarray]:
    """Return what the graphs should give for the tokens `rows` of a record.

    The record comes behind `num_past` cache rows.
    """
    cached = slice(num_past + rows.start, num_past + rows.stop)
    return {"key_out": layer.keys[cached], "value_out": layer.values[cached], "attention": layer.attention[rows]}


def _rows(env: Mapping[str, np.ndarray], rows: slice | np.ndarray) -> dict[str, np.ndarray]:
    return {name: env[name][rows] for name in ("query", "key", "value", "position_ids")}


def _spans(records: Sequence[Record]) -> list[slice]:
    ends = np.cumsum([len(record.token_ids) for record in records]).tolist()
    return [slice(end - len(record.token_ids), end) for record, end in zip(records, ends)]


def forward(graphs: Graphs, hidden: np.ndarray, position_ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
    """Return the logits [len(logit_rows), vocab_size] of one whole sequence, free.

    `hidden` [num_tokens, hidden_size] goes through every graph.
    """

    def attend(index: int, env: Mapping[str, np.ndarray]) -> np.ndarray:
        name = graphs.layers[index].variant
        if (mixer := graphs.assembly.state_mixers.get(name)) is not None:
            state = np.zeros((1, *mixer.state), np.float32)
            feeds = {**{key: env[key] for key in mixer.inputs}, "past_state": state}
            return graphs.run_mixer(name, "prefill", feeds)["attention"]
        variant = graphs.assembly.variants[name]
        past = {
            "past_key": np.zeros((1, variant.num_kv_heads, 1, variant.head_dim), graphs.dtype),
            "past_value": np.zeros((1, variant.num_kv_heads, 1, variant.value_head_dim), graphs.dtype),
            "past_lengths": np.zeros(1, np.int64),
        }
        return graphs.run_mixer(name, "prefill", {**_rows(env, slice(None)), **past})["attention"]

    env = {"hidden": hidden, "position_ids": position_ids, "logit_rows": logit_rows}
    return graphs.run_layers(graphs.layers, env, attend)
