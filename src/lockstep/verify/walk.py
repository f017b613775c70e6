"""Run the stages of an assembly along token sequences.

Graphs and sequences in; each stage with its inputs, its outputs and the expected ones out.

A stage is one call of one graph: the embedding, the block before each attention, the attention itself (three phases),
the exit. Where PyTorch was recorded, each stage gets PyTorch's activations, so that an error shows in the stage that
makes it and in no later one; else it gets the outputs of earlier graphs. The sequences run packed, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.assembly import BoundBlock
from lockstep.onnx_tools.overflow import overflows
from lockstep.progress import steps
from lockstep.verify.arrays import concatenate_rows
from lockstep.verify.graphs import Graphs, stale_cache
from lockstep.verify.records import LayerRecord, Record

Arrays = dict[str, np.ndarray]
Instead = Callable[["Stage", Arrays], Arrays]
_DECODED = 4  # rows that go through decode where the sequence has no tokens after its prompt


@dataclass(frozen=True)
class Tokens:
    """A request: ids [num_tokens] int64, the first `num_prompt` of them its prompt.

    record: PyTorch's activations of them; noisy: in fp16, each layer on the exact ones before it. Both None where
    PyTorch was not recorded.
    """

    ids: np.ndarray
    num_prompt: int
    record: Record | None = None
    noisy: Record | None = None


@dataclass(frozen=True)
class Stage:
    """One call of a graph.

    part: embedding, block, attention or exit. graph: a class, or `<variant>.prefill`, `<variant>.decode`.

    phase: of an attention, prefill (a whole sequence in one chunk), chunked (its second half after the first, or all
    of it after a synthetic cache) or decode (one row a request). layer: the one whose attention this is or comes
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
        return self.part, self.graph, self.phase, self.layer


@dataclass(frozen=True)
class StageRun:
    """The outputs of a stage's graph, and PyTorch's of the same, exact and in fp16 (none without a record)."""

    stage: Stage
    outputs: Arrays
    expected: Arrays
    noisy: Arrays

    def overflow(self, graphs: Graphs) -> str:
        """Return a line on the first value of a block that exceeds float16; empty without one, and for attention."""
        stage = self.stage
        if stage.part == "attention" or not overflows(self.outputs, self.expected):
            return ""
        return graphs.overflow(BoundBlock(stage.graph, stage.slots), stage.inputs, stage.layer)


class Walk:
    """The stages of `graphs` along `requests`, of which all or none are recorded.

    adapter_ids [all tokens]: the adapter slot of each token; none by default. capacity: the least rows of KV caches.
    decode_rows: requests of a decode call. instead: called with each stage and its graph's outputs, returns the outputs
    that the walk continues with; for walks without a record.
    """

    def __init__(
        self,
        graphs: Graphs,
        requests: Sequence[Tokens],
        adapter_ids: np.ndarray | None = None,
        capacity: int = 0,
        decode_rows: int = 16,
        instead: Instead | None = None,
    ):
        self.graphs = graphs
        self.requests = requests
        self._capacity = capacity
        self._decode_rows = decode_rows
        self._instead = instead
        self._exact = [request.record for request in requests if request.record]
        self._noisy = [request.noisy for request in requests if request.noisy]
        self.num_past = max((record.num_past for record in self._exact), default=0)
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
            self._env["hidden"] = self._from_record(lambda record: record.embedded, graphs.hidden_dtype)

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
        if self._exact:
            layers = layers[: len(self._exact[0].layers)]
        for index, layer in enumerate(steps(layers, "graphs beside PyTorch", "layers")):
            # In most models one value crosses to the next block: the hidden state, which is in the record. Of other
            # values only their effect is compared.

            def hidden(record: Record, index: int = index) -> np.ndarray:
                return record.layers[index].hidden

            def mixed(record: Record, index: int = index) -> np.ndarray:
                return record.layers[index].attention

            of = None
            if index and self.graphs.shows_hidden(layer.block):
                of = hidden
            run = self._block("block", layer.block, index, "hidden_out", of)
            yield run
            self._env |= {io.key: run.outputs[io.name] for io in self.graphs.classes[layer.block.graph].outputs}
            if of and self._exact:
                self._env["hidden"] = self._from_record(of, self.graphs.hidden_dtype)
            yield from self._mixer(layer.variant, index)
            if self._exact:
                self._env["attention"] = self._from_record(mixed, self.graphs.mixed_dtype(layer.variant))

    def exit(self) -> StageRun:
        return self._block("exit", self.graphs.exit, self.graphs.num_layers - 1, "logits", lambda record: record.logits)

    @np.errstate(over="ignore")
    def _from_record(self, of: Callable[[Record], np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Return PyTorch's activations in the dtype of the graphs: infinite where it has no such number."""
        return np.concatenate([of(record) for record in self._exact]).astype(dtype)

    def _block(
        self, part: str, block: BoundBlock, layer: int | None, output: str, of: Callable[[Record], np.ndarray] | None
    ) -> StageRun:
        """Run a block. output, of: an output that is in a record, and how to read it there; None: it is not."""
        env = {**self._env, **self.graphs.adapter_inputs(block, self._env)}
        signature = self.graphs.graph(block.graph).signature
        inputs = {io.name: env[io.name] for io in signature.inputs if io.name in env}
        stage = Stage(part, block.graph, "", layer, block.slots, inputs, self._positions)
        by_key = self.graphs.run_block(block, self._env)
        outputs = {io.name: by_key[io.key] for io in signature.outputs}
        if self._instead:
            outputs = self._instead(stage, outputs)
        exact = {}
        noisy = {}
        if self._exact and of:
            exact[output] = np.concatenate([of(record) for record in self._exact])
        if self._noisy and of:
            noisy[output] = np.concatenate([of(record) for record in self._noisy])
        return StageRun(stage, outputs, exact, noisy)

    def _mixer(self, variant: str, index: int) -> Iterator[StageRun]:
        """Run a layer's token mixer in its phases; an attention after a synthetic cache as one chunk, and decoding.

        One with a state continues where the state was recorded.
        """
        graphs = self.graphs
        num_past = self.num_past
        layers = [(exact.layers[index], noisy.layers[index]) for exact, noisy in zip(self._exact, self._noisy)]
        mixer = graphs.assembly.state_mixers.get(variant)
        pasts = [(exact.keys, exact.values) for exact, _ in layers]
        if mixer:
            arrays = {name: self._env[name] for name in mixer.inputs}
        else:
            arrays = self._scaled(variant, layers)
        mixed: list[tuple[np.ndarray, np.ndarray]] = []  # rows of tokens, and the mixer's output for them

        def before(owners: Sequence[int], starts: Sequence[int]) -> Arrays:
            if mixer:
                states = [layers[owner][0].states[start] for owner, start in zip(owners, starts) if layers]
                return {"past_state": np.concatenate(states or [np.zeros((1, *mixer.state), np.float32)])}
            # Without a record a request's keys and values are known only once it has been prefilled.
            without_past = [graphs.no_past(variant)] * len(self.requests)
            stored_pasts = [(pasts + without_past)[owner] for owner in owners]
            return stale_cache(stored_pasts, [num_past + start for start in starts], graphs.dtype, self._capacity)

        def expected(layer: LayerRecord, rows: np.ndarray) -> Arrays:
            if mixer:
                cached = {"state_out": layer.states[int(rows[-1]) + 1]}
            else:
                cached = {"key_out": layer.keys[num_past + rows], "value_out": layer.values[num_past + rows]}
            return {**cached, "attention": layer.attention[rows]}

        def has_states(owner: int, *counts: int) -> bool:
            return not mixer or (bool(layers) and all(count in layers[owner][0].states for count in counts))

        def run(phase: str, graph: str, owners: Sequence[int], rows: Sequence[np.ndarray]) -> StageRun:
            """Run a graph on rows of several requests; a prefill graph on those of one."""
            name = f"{variant}.{graph}"
            tokens = np.concatenate(
                [self._spans[owner].start + row_indices for owner, row_indices in zip(owners, rows)]
            )
            feeds = {key: array[tokens] for key, array in arrays.items()}
            feeds |= before(owners, [int(row_indices[0]) for row_indices in rows])
            declared = {io.name for io in graphs.graph(name).signature.inputs}
            inputs = {key: array for key, array in feeds.items() if key in declared}
            outputs = graphs.run_mixer(variant, graph, inputs)
            stage = Stage("attention", name, phase, index, {}, inputs, self._positions[tokens])
            if self._instead:
                outputs = self._instead(stage, outputs)
            if phase != "chunked":
                mixed.append((tokens, outputs["attention"]))
            sides: list[Arrays] = []  # the expected outputs, exact and in fp16
            for side in zip(*(layers[owner] for owner in owners if layers)):
                pieces = [expected(layer, row_indices) for layer, row_indices in zip(side, rows)]
                sides.append(concatenate_rows(pieces))
            return StageRun(stage, outputs, *(sides or ({}, {})))

        for owner, request in enumerate(self.requests):
            rows = np.arange(len(request.ids))
            half = len(request.ids) // 2
            if num_past and not mixer:
                yield run("chunked", "prefill", [owner], [rows])
                continue
            prefilled = run("prefill", "prefill", [owner], [rows])
            yield prefilled
            if not mixer and not layers:
                pasts.append((prefilled.outputs["key_out"], prefilled.outputs["value_out"]))
            if half and has_states(owner, half):
                yield run("chunked", "prefill", [owner], [rows[half:]])
        decoded: list[tuple[int, int]] = []
        for owner in range(len(self.requests)):
            decoded += [(owner, row) for row in self._decoded(owner)]
        pairs = [(owner, np.array([row])) for owner, row in decoded if has_states(owner, row, row + 1)]
        for start in range(0, len(pairs), self._decode_rows):
            owners, decoded_rows = zip(*pairs[start : start + self._decode_rows])
            yield run("decode", "decode", owners, decoded_rows)
        attention = np.empty((len(self._positions), *mixed[0][1].shape[1:]), mixed[0][1].dtype)
        for tokens, output in mixed:
            attention[tokens] = output
        self._env["attention"] = attention

    def _decoded(self, owner: int) -> range:
        """Return the tokens of a request that go through decode too."""
        first = self.requests[owner].num_prompt
        count = len(self.requests[owner].ids)
        if first == 1 or self.num_past:  # a server runs a single token as decode, too
            first = 0
        elif first >= count:
            first = max(count - _DECODED, 0)
        return range(first, count)

    def _scaled(self, variant: str, layers: Sequence[tuple[LayerRecord, LayerRecord]]) -> Arrays:
        """Return the block's outputs that attention reads, scaled as in PyTorch after a synthetic cache."""
        arrays = {name: self._env[name] for name in ("query", "key", "value", "position_ids")}
        if not self.num_past:
            return arrays
        ((layer, _),) = layers
        spec = self.graphs.assembly.variants[variant]
        query_scale = np.full(arrays["query"].shape[1], layer.query_scale, np.float32)
        if spec.sinks:
            query_scale[spec.head_dim :: spec.query_dim] = 1  # the sink logits
        scales = {"query": query_scale, "key": np.float32(layer.key_scale)}
        for name, scale in scales.items():
            arrays[name] = (arrays[name] * scale).astype(arrays[name].dtype)
        return arrays
