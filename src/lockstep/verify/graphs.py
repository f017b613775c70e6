"""The assembly's graphs as callables.

One ONNX Runtime session for each graph, weights given as inputs. Needs no torch.

Graph optimisation is off: the graph is checked as exported; the golden check judges the backends' engines. ONNX Runtime
has no bf16 on a CPU: such graphs are computed in fp32, on the weights in bf16.

Names, dtypes and shapes are checked here: ONNX Runtime reports a wrong name late, and Polygraphy not at all: it matches
inputs by position where names differ, drops superfluous ones, casts and reshapes others, skips outputs that only one
side has, and reports PASSED.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from lockstep.artifacts.adapters import B_SUFFIX, IDS
from lockstep.artifacts.assembly import Assembly, BoundBlock, GraphFile
from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.quantized import module_of
from lockstep.artifacts.signature import IO, Signature, check_arrays
from lockstep.errors import CheckError
from lockstep.onnx_tools.graph_runner import GraphRunner
from lockstep.onnx_tools.judge import Spread
from lockstep.onnx_tools.overflow import find_overflow
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.signature import signature_of
from lockstep.onnx_tools.widened import widened, widened_dtype
from lockstep.step.network import layer_count
from lockstep.verify.noisy_graph import NoisyGraph
from lockstep.weights import Weights, check_slots, slot_array

_STALE = 300.0  # in unused cache rows: an error where a mask does not hide them, yet finite and within fp16's range
_SPARE = 3  # such rows after the longest request


def check_graph(path: Path, sha256: str, signature: Signature) -> onnx.ModelProto:
    """Return the model in the file. Raises CheckError for another digest, and other inputs or outputs."""
    if not path.is_file():
        raise CheckError(f"{path}: expected a graph of the assembly, found no file; export again")
    digest = sha256_file(path)
    if digest != sha256:
        raise CheckError(
            f"{path}: sha256: expected {sha256}, found {digest}; the file has changed since the export: export again"
        )
    model = onnx.load(path, load_external_data=False)
    signature.check(signature_of(model.graph), str(path), "export again")
    return model


class Graph:
    """One graph of the assembly, with float32 inputs and outputs instead of bfloat16."""

    def __init__(self, path: Path, graph: GraphFile, threads: int | None):
        self.path = path
        declared = graph.signature
        self.model = check_graph(path, graph.sha256, declared)
        self.computed = widened(self.model)
        self.inputs = _widened(declared.inputs)
        self.slots = _widened(declared.slots)
        self.outputs = _widened(declared.outputs)
        self._threads = threads
        self._noisy = NoisyGraph(self.model, [io.name for io in self.slots], threads)

    @functools.cached_property
    def session(self) -> ort.InferenceSession:
        return open_session(self.computed.SerializeToString(), self._threads)

    @contextlib.contextmanager
    def plain_file(self) -> Iterator[Path]:
        """Yield a file of the graph, with float32 for e4m3, which Polygraphy does not know."""
        plain = widened(self.computed, onnx.TensorProto.FLOAT8E4M3FN)
        if plain is self.model:
            yield self.path
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / self.path.name
            file.write_bytes(plain.SerializeToString())
            yield file

    def run(
        self, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Run the graph. Raises CheckError for arrays that are not those declared, or where the library fails."""
        weights = weights or {}
        dims = check_arrays(str(self.path), "input", self.inputs, inputs)
        check_arrays(str(self.path), "slot", self.slots, weights, dims)
        try:
            arrays = self.session.run(None, {**inputs, **weights})
        except CheckError as error:
            raise CheckError(f"{self.path}: {error}") from error
        outputs = dict(zip([value.name for value in self.session.get_outputs()], arrays))
        check_arrays(str(self.path), "output", self.outputs, outputs, dims)
        return outputs

    def noise(self, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> dict[str, Spread]:
        """Return the noise of each row of the outputs of `run`. feeds: its inputs and weights."""
        return self._noisy.noise(feeds, outputs)


def _widened(ios: Sequence[IO]) -> tuple[IO, ...]:
    return tuple(replace(io, dtype=widened_dtype(io.dtype)) for io in ios)


class Graphs(GraphRunner):
    """An assembly's graphs and its weights, of the first `num_layers` layers."""

    def __init__(self, path: Path, assembly: Assembly, weights: Weights, layers: int | str, threads: int | None = None):
        """Raises InputError for weights of another precision and layers that the model does not have."""
        self.path = path
        self.assembly = assembly
        self.weights = weights
        weights.check_precision(assembly.precision, path)
        self.num_layers = layer_count(assembly, layers)
        self.dtype = np.dtype(widened_dtype(assembly.dtype))
        self.hidden_dtype = np.dtype(widened_dtype(assembly.hidden_dtype))
        self.layers = assembly.first_layers(self.num_layers)
        self.exit = assembly.exit_of(self.layers)
        self.embedding = assembly.embedding
        parts = (self.embedding, self.exit, *(layer.block for layer in self.layers))

        def opened(graph: GraphFile) -> Graph:
            return Graph(path.parent / graph.file, graph, threads)

        classes = sorted({part.graph for part in parts})
        self.classes = {name: opened(assembly.classes[name]) for name in classes}
        self.pieces: dict[str, Graph] = {}
        self._adapters: dict[str, dict[str, np.ndarray]] = {}
        self.attention: dict[str, Graph] = {}
        for name in sorted({layer.variant for layer in self.layers}):
            for phase, graph in assembly.mixers[name].phases().items():
                self.attention[f"{name}.{phase}"] = opened(graph)
        if (ranks := assembly.tensor_parallel) is not None:
            used: set[str] = set()
            for name in self.classes.keys() & ranks.classes:
                used |= {piece.graph for piece in ranks.classes[name].pieces}
            self.pieces = {name: opened(ranks.graphs[name]) for name in sorted(used)}
            self.pieces |= {name: opened(graph) for name, graph in ranks.all_graphs() if name in self.attention}
        # A rank's pieces come last: its attention has the name of the whole one, which ranks do not run.
        self._by_name = {**self.classes, **self.attention, **self.pieces}
        for part in parts:
            check_slots(weights, part.slots, assembly.classes[part.graph].signature.slots, part.graph)

    def graphs(self) -> dict[str, Graph]:
        return {**self.classes, **self.attention, **{f"{name} of a rank": graph for name, graph in self.pieces.items()}}

    def graph(self, name: str) -> Graph:
        return self._by_name[name]

    def mixed_dtype(self, name: str) -> np.dtype:
        outputs = self.assembly.mixers[name].decode.signature.outputs
        return np.dtype(widened_dtype(next(io.dtype for io in outputs if io.name == "attention")))

    def no_past(self, variant: str) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of no tokens, [0, num_kv_heads, head_dim], as `stale_cache` takes them."""
        spec = self.assembly.variants[variant]
        keys = np.empty((0, spec.num_kv_heads, spec.head_dim), self.dtype)
        return keys, np.empty((0, spec.num_kv_heads, spec.value_head_dim), self.dtype)

    def shows_hidden(self, part: BoundBlock) -> bool:
        """Return whether a block's output `hidden` is the hidden state that enters its layer."""
        # Outputs that the next block reads: `hidden` alone in most models. Of several one may be called so though it is
        # another value; only the export of layers with a state names them by their meaning.
        carried = [io.key for io in self.classes[part.graph].outputs if io.key != io.name]
        return carried == ["hidden"] or ("hidden" in carried and bool(self.assembly.state_mixers))

    def run_graph(
        self, name: str, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        graph = self._by_name[name]
        return graph.run(_declared(graph, inputs), weights)

    def weights_of(self, name: str, slots: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
        return {slot.name: self.slot_array(slots[slot.name], slot) for slot in self._by_name[name].slots}

    def feeds(
        self, name: str, inputs: Mapping[str, np.ndarray], slots: Mapping[str, Sequence[str]]
    ) -> dict[str, np.ndarray]:
        """Return a graph's inputs, taken from `inputs`, and its weights. Raises CheckError where one is missing."""
        return _declared(self._by_name[name], inputs) | self.weights_of(name, slots)

    def overflow(self, part: BoundBlock, env: Mapping[str, np.ndarray], index: int | None) -> str:
        """Return a line on the first value of a block that exceeds float16; empty without one."""
        feeds = self.feeds(part.graph, {**env, **self.adapter_inputs(part, env)}, part.slots)
        overflow = find_overflow(self._by_name[part.graph].model, feeds)
        if overflow is None:
            return ""
        return overflow.text(part.graph, index, self.assembly.residual)

    def adapter_inputs(self, part: BoundBlock, env: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a block's inputs of adapters; tokens have no adapter where `env` has no ids."""
        if self.assembly.adapters is None:
            return {}
        tokens = next(len(env[key]) for key in ("token_ids", "hidden", "position_ids") if key in env)
        return {**self.adapter_arrays(part.graph), IDS: env.get(IDS, np.full(tokens, -1, np.int64))}

    def adapter_arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return seeded adapters in every slot, whose products are about as large as standard normal activations."""
        assert self.assembly.adapters is not None  # the caller has checked
        if name in self._adapters:
            return self._adapters[name]
        random = np.random.default_rng(0)
        arrays = {}
        for key, shape in self.assembly.adapters.shapes(name):
            # Each number of a product is a sum of this many: one adapter's rank of B, in_features of A.
            summands = shape[0]
            if key.endswith(B_SUFFIX):
                summands = self.assembly.adapters.max_lora_rank
            size = np.sqrt(np.float32(summands))
            arrays[key] = (random.standard_normal(shape, np.float32) / size).astype(self.dtype)
        self._adapters[name] = arrays
        return arrays

    def adapted_modules(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return {linear layer of the model: its A and B in `adapter_arrays`}."""
        assert self.assembly.adapters is not None  # the caller has checked
        matrices = {}
        for part in (*(layer.block for layer in self.layers), self.exit):
            arrays = self.adapter_arrays(part.graph)
            for weight, slot in self.assembly.adapters.classes.get(part.graph, {}).items():
                matrices[module_of(part.slots[weight][0])] = arrays[slot.a], arrays[slot.b]
        return matrices

    def slot_array(self, tensors: Sequence[str], slot: IO) -> np.ndarray:
        array = slot_array(self.weights, tensors, slot.sizes).astype(widened_dtype(slot.dtype), copy=False)
        # So that the mapped files of earlier slots do not count as this process's memory.
        self.weights.drop_pages()
        return array

    def forward_inputs(self) -> list[IO]:
        hidden = self.classes[self.layers[0].block.graph].inputs[0]
        rows = next(io for io in self.classes[self.exit.graph].inputs if io.name == "logit_rows")
        return [hidden, IO("position_ids", "int64", ("num_tokens",)), rows]

    def uncut(self, threads: int | None = None) -> Graph | None:
        """Return the uncut graph, whose weights are slots; None when the model is cut."""
        uncut = self.assembly.batchful
        if uncut is None or self.num_layers < self.assembly.num_layers:
            return None
        return Graph(self.path.parent / uncut.file, uncut, threads)

    def uncut_weights(self, uncut: Graph) -> dict[str, np.ndarray]:
        assert self.assembly.batchful is not None  # it is open
        tensors = self.assembly.batchful.tensors
        return {slot.name: self.slot_array(tensors[slot.name], slot) for slot in uncut.slots}


def _declared(graph: Graph, env: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    missing = [io.name for io in graph.inputs if io.name not in env]
    if missing:
        raise CheckError(
            f"{graph.path}: expected inputs that a decoder step has ({', '.join(sorted(env))}), found "
            f"{', '.join(missing)}; export again"
        )
    return {io.name: env[io.name] for io in graph.inputs}


def stale_cache(
    pasts: Sequence[tuple[np.ndarray, np.ndarray]], lengths: Sequence[int], dtype: np.dtype, capacity: int = 0
) -> dict[str, np.ndarray]:
    """Return the inputs of a KV cache of at least `capacity` rows, with stale numbers after each request's tokens.

    pasts: keys and values [num_tokens, num_kv_heads, head_dim] of each request, of which the first `lengths` count.
    """
    capacity = max(capacity, max(lengths) + _SPARE)
    caches = {}
    for name, rows in zip(("past_key", "past_value"), zip(*pasts), strict=True):
        cache = np.full((len(lengths), rows[0].shape[1], capacity, rows[0].shape[2]), _STALE, dtype)
        for request, length in enumerate(lengths):
            cache[request, :, :length] = rows[request][:length].swapaxes(0, 1)
        caches[name] = cache
    return {**caches, "past_lengths": np.array(lengths, np.int64)}
