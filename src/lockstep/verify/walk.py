"""Run the stages of an assembly along token sequences.

Graphs and sequences in, each stage with its inputs, its outputs and what is expected of them out.

A stage is one call of one graph: the embedding, the block before each attention, the attention itself (three phases),
the exit. Where PyTorch was recorded, each stage gets what PyTorch had there, so that an error shows in the stage that
makes it and in no later one; else it gets what the graphs before it gave. The sequences run packed, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.assembly import BoundBlock
from lockstep.onnx_tools.overflow import overflows
from lockstep.verify.graphs import Graphs, stale_cache

if TYPE_CHECKING:
    from lockstep.verify.validate.torch_trace import LayerRecord, Record

Arrays = dict[str, np.ndarray]
_DECODED = 4  # rows that go through decode where the sequence has no tokens behind its prompt


@dataclass(frozen=True)
class Tokens:
    """A request: ids [num_tokens] int64, the first `num_prompt` of them its prompt.

    record: what PyTorch computed of them; noisy: the same in fp16, of each layer on what is right before it. Both None
    where it was not recorded.
    """

    ids: np.ndarray
    num_prompt: int
    record: Record | None = None
    noisy: Record | None = None


@dataclass(frozen=True)
class Stage:
    """One call of a graph.

    part: embedding, block, attention or exit. graph: a class, or `<variant>.prefill`, `<variant>.decode`.

    phase: of an attention, prefill (a whole sequence in one piece), chunked (its second half behind the first, or all
    of it behind a synthetic cache) or decode (one row a request). layer: the one whose attention this is or comes
    before; the last for the exit, None for the embedding. slots: {slot: tensors}. positions [rows]: of the token that
    each row of the outputs belongs to.
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
    """What a stage's graph gave, and what PyTorch has of it, exact and in fp16 (none without a record)."""

    stage: Stage
    outputs: Arrays
    expected: Arrays
    noisy: Arrays

    def overflow(self, graphs: Graphs) -> str:
        """Say which value of a block float16 does not hold; empty where it holds all, and for an attention."""
        stage = self.stage
        if stage.part == "attention" or not overflows(self.outputs, self.expected):
            return ""
        return graphs.overflow(BoundBlock(stage.graph, stage.slots), stage.inputs, stage.layer)


class Walk:
    """The stages of `graphs` along `requests`, of which all or none are recorded.

    adapter_ids [all tokens]: the adapter slot of each token; none by default. capacity: the least rows of KV caches.
    decode_rows: requests that a decode call takes.
    """

    def __init__(
        self,
        graphs: Graphs,
        requests: Sequence[Tokens],
        adapter_ids: np.ndarray | None = None,
        capacity: int = 0,
        decode_rows: int = 16,
    ):
        self.graphs, self.requests, self._capacity, self._decode_rows = graphs, requests, capacity, decode_rows
        self._exact = [request.record for request in requests if request.record]
        self._noisy = [request.noisy for request in requests if request.noisy]
        self.num_past = self._exact[0].num_past if self._exact else 0
        ends = np.cumsum([len(request.ids) for request in requests]).tolist()
        self._spans = [slice(end - len(request.ids), end) for request, end in zip(requests, ends)]
        self._positions = np.concatenate([self.num_past + np.arange(len(request.ids)) for request in requests])
        self._env: Arrays = {
            "token_ids": np.concatenate([request.ids for request in requests]),
            "position_ids": self._positions,
            "logit_rows": np.arange(ends[-1]),
        }
        if adapter_ids is not None:
            self._env[IDS] = adapter_ids
        if self._exact:
            self._env["hidden"] = self._known(lambda record: record.embedded, graphs.hidden_dtype)

    def __iter__(self) -> Iterator[StageRun]:
        yield self.embedding()
        yield from self.layers()
        yield self.exit()

    def embedding(self) -> StageRun:
        run = self._block("embedding", self.graphs.embedding, None, "hidden", lambda record: record.embedded)
        self._env.setdefault("hidden", run.outputs["hidden"].astype(self.graphs.hidden_dtype))
        return run

    def layers(self) -> Iterator[StageRun]:
        """Run the block and the attention of each layer, of as many as were recorded."""
        layers = self.graphs.layers
        for index, layer in enumerate(layers[: len(self._exact[0].layers)] if self._exact else layers):
            # One value crosses to the next block in most models: the hidden state, which PyTorch shows. Of others only
            # their effect is seen.

            def hidden(record: Record, index: int = index) -> np.ndarray:
                return record.layers[index].hidden

            def mixed(record: Record, index: int = index) -> np.ndarray:
                return record.layers[index].attention

            of = hidden if index and self.graphs.shows_hidden(layer.block) else None
            run = self._block("block", layer.block, index, "hidden_out", of)
            yield run
            self._env |= {io.key: run.outputs[io.name] for io in self.graphs.classes[layer.block.graph].outputs}
            if of and self._exact:
                self._env["hidden"] = self._known(of, self.graphs.hidden_dtype)
            if layer.variant in self.graphs.assembly.state_mixers:
                yield from self._state(layer.variant, index)
            else:
                yield from self._attention(layer.variant, index)
            if self._exact:
                self._env["attention"] = self._known(mixed, self.graphs.mixed_dtype(layer.variant))

    def exit(self) -> StageRun:
        return self._block("exit", self.graphs.exit, self.graphs.num_layers - 1, "logits", lambda record: record.logits)

    @np.errstate(over="ignore")
    def _known(self, of: Callable[[Record], np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Return what PyTorch gave as the graphs take it: infinite where their type ends before."""
        return np.concatenate([of(record) for record in self._exact]).astype(dtype)

    def _block(
        self, part: str, block: BoundBlock, layer: int | None, output: str, of: Callable[[Record], np.ndarray] | None
    ) -> StageRun:
        """Run a block. output, of: one that PyTorch has, and where it stands in a record; None: it has none."""
        env = {**self._env, **self.graphs.adapter_inputs(block, self._env)}
        signature = self.graphs.graph(block.graph).signature
        inputs = {io.name: env[io.name] for io in signature.inputs if io.name in env}
        stage = Stage(part, block.graph, "", layer, block.slots, inputs, self._positions)
        outputs = self.graphs.run_block(block, self._env)
        exact, noisy = (
            {output: np.concatenate([of(record) for record in side])} if side and of else {}
            for side in (self._exact, self._noisy)
        )
        return StageRun(stage, {io.name: outputs[io.key] for io in signature.outputs}, exact, noisy)

    def _mixer(
        self, name: str, graph: str, phase: str, layer: int, rows: np.ndarray, inputs: Arrays, *known: Arrays
    ) -> StageRun:
        """Run a token mixer's graph. rows: the tokens of its outputs. known: what is expected, exact and in fp16."""
        declared = {io.name for io in self.graphs.graph(f"{name}.{graph}").signature.inputs}
        inputs = {key: array for key, array in inputs.items() if key in declared}
        stage = Stage("attention", f"{name}.{graph}", phase, layer, {}, inputs, self._positions[rows])
        return StageRun(stage, self.graphs.run_mixer(name, graph, inputs), *(known or ({}, {})))

    def _layer(self, index: int) -> list[tuple[LayerRecord, LayerRecord]]:
        return [(exact.layers[index], noisy.layers[index]) for exact, noisy in zip(self._exact, self._noisy)]

    def _attention(self, variant: str, index: int) -> Iterator[StageRun]:
        """Run a layer's attention in its phases; behind a synthetic cache as one chunk, and in one decode step."""
        graphs, num_past, records = self.graphs, self.num_past, self._layer(index)
        spec = graphs.assembly.variants[variant]
        shapes = [(0, spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.value_head_dim)]
        none = np.empty(shapes[0], graphs.dtype), np.empty(shapes[1], graphs.dtype)
        pasts = [(exact.keys, exact.values) for exact, _ in records] or [none] * len(self.requests)
        scaled = self._scaled(variant, records)
        attention = np.empty((len(self._positions), spec.num_heads * spec.value_head_dim), graphs.dtype)

        def run(phase: str, graph: str, owners: Sequence[int], rows: Sequence[np.ndarray]) -> StageRun:
            """Run a graph on the rows of some requests, by request; of a prefill graph there is one."""
            tokens = self._tokens(owners, rows)
            lengths = [num_past + int(own[0]) for own in rows]
            past = stale_cache([pasts[owner] for owner in owners], lengths, graphs.dtype, self._capacity)
            known = [
                {
                    "key_out": np.concatenate([layer.keys[num_past + own] for layer, own in zip(layers, rows)]),
                    "value_out": np.concatenate([layer.values[num_past + own] for layer, own in zip(layers, rows)]),
                    "attention": np.concatenate([layer.attention[own] for layer, own in zip(layers, rows)]),
                }
                for layers in zip(*(records[owner] for owner in owners if records))
            ]
            return self._mixer(variant, graph, phase, index, tokens, {**_rows(scaled, tokens), **past}, *known)

        for owner, request in enumerate(self.requests):
            rows, half = np.arange(len(request.ids)), len(request.ids) // 2
            if num_past:
                yield run("chunked", "prefill", [owner], [rows])
                continue
            whole = run("prefill", "prefill", [owner], [rows])
            yield whole
            attention[self._spans[owner]] = whole.outputs["attention"]
            if not records:
                pasts[owner] = whole.outputs["key_out"], whole.outputs["value_out"]
            if half:
                yield run("chunked", "prefill", [owner], [rows[half:]])
        pairs = [(owner, np.array([row])) for owner in range(len(self.requests)) for row in self._decoded(owner)]
        for start in range(0, len(pairs), self._decode_rows):
            owners, decoded_rows = zip(*pairs[start : start + self._decode_rows])
            decoded = run("decode", "decode", owners, decoded_rows)
            yield decoded
            attention[self._tokens(owners, decoded_rows)] = decoded.outputs["attention"]
        self._env["attention"] = attention

    def _tokens(self, owners: Sequence[int], rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([self._spans[owner].start + own for owner, own in zip(owners, rows)])

    def _decoded(self, owner: int) -> range:
        """Return the tokens of a request that go through decode too."""
        first, count = self.requests[owner].num_prompt, len(self.requests[owner].ids)
        if first == 1 or self.num_past:  # as it does when it is served
            first = 0
        elif first >= count:
            first = max(count - _DECODED, 0)
        return range(first, count)

    def _scaled(self, variant: str, records: Sequence[tuple[LayerRecord, LayerRecord]]) -> Arrays:
        """Return what attention reads of a block, scaled as PyTorch's was behind a synthetic cache."""
        arrays = {name: self._env[name] for name in ("query", "key", "value", "position_ids")}
        if not self.num_past:
            return arrays
        ((layer, _),), spec = records, self.graphs.assembly.variants[variant]
        query_scale = np.full(arrays["query"].shape[1], layer.query_scale, np.float32)
        if spec.sinks:
            query_scale[spec.head_dim :: spec.query_dim] = 1  # what is no query's number
        scales = {"query": query_scale, "key": np.float32(layer.key_scale)}
        return {
            name: (array * scales[name]).astype(array.dtype) if name in scales else array
            for name, array in arrays.items()
        }

    def _state(self, name: str, index: int) -> Iterator[StageRun]:
        """Run a mixer with a state on whole sequences and, where states are known, on second halves and last tokens."""
        mixer, records, mixed = self.graphs.assembly.state_mixers[name], self._layer(index), []

        def run(phase: str, graph: str, owners: Sequence[int], start: Callable[[int], int]) -> StageRun:
            """Run a graph on the tokens of some requests from `start` of their number on."""
            counts = [len(self.requests[owner].ids) for owner in owners]
            rows = [np.arange(start(count), count) for count in counts]
            tokens = self._tokens(owners, rows)
            known = [
                {
                    "state_out": np.concatenate([layer.states[count] for layer, count in zip(layers, counts)]),
                    "attention": np.concatenate([layer.attention[own] for layer, own in zip(layers, rows)]),
                }
                for layers in zip(*(records[owner] for owner in owners if records))
            ]
            states = [records[owner][0].states[start(count)] for owner, count in zip(owners, counts) if records]
            inputs = _rows({key: self._env[key] for key in mixer.inputs}, tokens)
            inputs["past_state"] = np.concatenate(states or [np.zeros((1, *mixer.state), np.float32)])
            return self._mixer(name, graph, phase, index, tokens, inputs, *known)

        for owner, request in enumerate(self.requests):
            whole = run("prefill", "prefill", [owner], lambda count: 0)
            yield whole
            mixed.append(whole.outputs["attention"])
            if records and len(request.ids) > 1:
                yield run("chunked", "prefill", [owner], lambda count: count // 2)
        if records:
            yield run("decode", "decode", range(len(self.requests)), lambda count: count - 1)
        self._env["attention"] = np.concatenate(mixed)


def _rows(arrays: Arrays, rows: np.ndarray) -> Arrays:
    return {name: array[rows] for name, array in arrays.items()}
