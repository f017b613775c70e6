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
Override = Callable[["Stage", Arrays, Arrays], Arrays]
Read = Callable[[Record], np.ndarray]  # an activation of a record
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
    decode_rows: requests of a decode call. override: called with each stage (that of a token mixer only without
    records), its graph's outputs and PyTorch's, as far as they are recorded; returns the outputs that the walk has in
    their place.
    """

    def __init__(
        self,
        graphs: Graphs,
        requests: Sequence[Tokens],
        adapter_ids: np.ndarray | None = None,
        capacity: int = 0,
        decode_rows: int = 16,
        override: Override | None = None,
    ):
        self.graphs = graphs
        self.requests = requests
        self._capacity = capacity
        self._decode_rows = decode_rows
        self._override = override
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
            read = None
            if index and self.graphs.shows_hidden(layer.block):
                read = _hidden_of(index)
            run = self._block("block", layer.block, index, "hidden_out", read)
            yield run
            self._env |= {io.key: run.outputs[io.name] for io in self.graphs.classes[layer.block.graph].outputs}
            if read and self._exact:
                self._env["hidden"] = self._from_record(read, self.graphs.hidden_dtype)
            yield from self._mixer(layer.variant, index)
            if self._exact:
                self._env["attention"] = self._from_record(_attention_of(index), self.graphs.mixed_dtype(layer.variant))

    def exit(self) -> StageRun:
        return self._block("exit", self.graphs.exit, self.graphs.num_layers - 1, "logits", lambda record: record.logits)

    @np.errstate(over="ignore")
    def _from_record(self, read: Read, dtype: np.dtype) -> np.ndarray:
        """Return PyTorch's activations in the dtype of the graphs: infinite where it has no such number."""
        return np.concatenate([read(record) for record in self._exact]).astype(dtype)

    def _block(self, part: str, block: BoundBlock, layer: int | None, output: str, read: Read | None) -> StageRun:
        """Run a block. output, read: an output that is in a record, and how to read it there; None: it is not."""
        env = {**self._env, **self.graphs.adapter_inputs(block, self._env)}
        graph = self.graphs.graph(block.graph)
        inputs = {io.name: env[io.name] for io in graph.inputs if io.name in env}
        stage = Stage(part, block.graph, "", layer, block.slots, inputs, self._positions)
        by_key = self.graphs.run_block(block, self._env)
        outputs = {io.name: by_key[io.key] for io in graph.outputs}
        exact = {}
        noisy = {}
        if self._exact and read:
            exact[output] = np.concatenate([read(record) for record in self._exact])
        if self._noisy and read:
            noisy[output] = np.concatenate([read(record) for record in self._noisy])
        if self._override:
            outputs = self._override(stage, outputs, exact)
        return StageRun(stage, outputs, exact, noisy)

    def _mixer(self, variant: str, index: int) -> Iterator[StageRun]:
        """Run a layer's token mixer in its phases; an attention after a synthetic cache as one chunk, and decoding.

        A mixer with a state is chunked and decodes only where PyTorch's state was recorded. In the functions below
        `owners` are numbers of requests, and `rows` those of each one's tokens that a call computes.
        """
        graphs = self.graphs
        num_past = self.num_past
        exact = [record.layers[index] for record in self._exact]
        noisy = [record.layers[index] for record in self._noisy]
        mixer = graphs.assembly.state_mixers.get(variant)
        pasts = [(layer.keys, layer.values) for layer in exact]
        if mixer:
            arrays = {name: self._env[name] for name in mixer.inputs}
        else:
            arrays = self._scaled(variant, exact)
            if not exact:  # a request's keys and values follow from its prefill
                pasts = [graphs.no_past(variant)] * len(self.requests)
        mixed: list[tuple[np.ndarray, np.ndarray]] = []  # rows of tokens, and the mixer's output for them

        def past_inputs(owners: Sequence[int], starts: Sequence[int]) -> Arrays:
            if mixer:
                states = [exact[owner].states[start] for owner, start in zip(owners, starts) if exact]
                return {"past_state": np.concatenate(states or [np.zeros((1, *mixer.state), np.float32)])}
            lengths = [num_past + start for start in starts]
            return stale_cache([pasts[owner] for owner in owners], lengths, graphs.dtype, self._capacity)

        def recorded(layers: Sequence[LayerRecord], owners: Sequence[int], rows: Sequence[np.ndarray]) -> Arrays:
            pieces = []
            for owner, numbers in zip(owners, rows):
                layer = layers[owner]
                if mixer:
                    cached = {"state_out": layer.states[int(numbers[-1]) + 1]}
                else:
                    cached = {"key_out": layer.keys[num_past + numbers], "value_out": layer.values[num_past + numbers]}
                pieces.append({**cached, "attention": layer.attention[numbers]})
            return concatenate_rows(pieces)

        def has_states(owner: int, *counts: int) -> bool:
            return not mixer or (bool(exact) and all(count in exact[owner].states for count in counts))

        def run(phase: str, graph: str, owners: Sequence[int], rows: Sequence[np.ndarray]) -> StageRun:
            """Run a graph on rows of several requests; a prefill graph on those of one."""
            name = f"{variant}.{graph}"
            tokens = np.concatenate([self._spans[owner].start + numbers for owner, numbers in zip(owners, rows)])
            feeds = {key: array[tokens] for key, array in arrays.items()}
            feeds |= past_inputs(owners, [int(numbers[0]) for numbers in rows])
            declared = {io.name for io in graphs.graph(name).inputs}
            inputs = {key: array for key, array in feeds.items() if key in declared}
            outputs = graphs.run_mixer(variant, graph, inputs)
            stage = Stage("attention", name, phase, index, {}, inputs, self._positions[tokens])
            if self._override and not exact:
                outputs = self._override(stage, outputs, {})
            if phase != "chunked":  # tokens of a chunk have their output of the whole prefill, or get that of decode
                mixed.append((tokens, outputs["attention"]))
            if not exact:
                return StageRun(stage, outputs, {}, {})
            return StageRun(stage, outputs, recorded(exact, owners, rows), recorded(noisy, owners, rows))

        for owner, request in enumerate(self.requests):
            rows = np.arange(len(request.ids))
            half = len(request.ids) // 2
            if num_past and not mixer:
                yield run("chunked", "prefill", [owner], [rows])
                continue
            prefilled = run("prefill", "prefill", [owner], [rows])
            yield prefilled
            if not mixer and not exact:
                pasts[owner] = prefilled.outputs["key_out"], prefilled.outputs["value_out"]
            if half and has_states(owner, half):
                yield run("chunked", "prefill", [owner], [rows[half:]])
        decoded: list[tuple[int, np.ndarray]] = []
        for owner in range(len(self.requests)):
            decoded += [(owner, np.array([row])) for row in self._decoded(owner) if has_states(owner, row, row + 1)]
        for start in range(0, len(decoded), self._decode_rows):
            owners, decoded_rows = zip(*decoded[start : start + self._decode_rows])
            yield run("decode", "decode", owners, decoded_rows)
        attention = np.empty((len(self._positions), *mixed[0][1].shape[1:]), mixed[0][1].dtype)
        for tokens, output in mixed:  # decode comes last: the walk continues with its output, as a server would
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

    def _scaled(self, variant: str, layers: Sequence[LayerRecord]) -> Arrays:
        """Return the block's outputs that attention reads, scaled as in PyTorch after a synthetic cache."""
        arrays = {name: self._env[name] for name in ("query", "key", "value", "position_ids")}
        if not self.num_past:
            return arrays
        (layer,) = layers  # one sequence at a time follows a synthetic cache
        spec = self.graphs.assembly.variants[variant]
        query_scale = np.full(arrays["query"].shape[1], layer.query_scale, np.float32)
        if spec.sinks:
            query_scale[spec.head_dim :: spec.query_dim] = 1  # the sink logits
        scales = {"query": query_scale, "key": np.float32(layer.key_scale)}
        for name, scale in scales.items():
            arrays[name] = (arrays[name] * scale).astype(arrays[name].dtype)
        return arrays


def _hidden_of(index: int) -> Read:
    return lambda record: record.layers[index].hidden


def _attention_of(index: int) -> Read:
    return lambda record: record.layers[index].attention
