"""The assembly's graphs as callables: one ONNX Runtime session for each graph, weights given as inputs.

Graph optimisation is off: what is validated is the graph as exported. What a backend makes of it is the golden check's
to judge. ONNX Runtime has no bf16 on a CPU: such graphs are computed in fp32, on the weights in bf16.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.assembly import Assembly, BoundBlock, GraphFile
from lockstep.artifacts.signature import IO, Signature, check_arrays
from lockstep.artifacts.tensor_parallel import attention_shards
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.run_ranks import run_sharded_attention, run_sharded_block
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened, widened_dtype
from lockstep.step.network import layer_count
from lockstep.verify.validate.gate import check_graph
from lockstep.weights import Weights, check_slots, slot_array


class Graph:
    """One graph of the assembly, its file checked: `run` takes and gives arrays by name, exactly those declared;
    float32 for bfloat16."""

    def __init__(self, path: Path, graph: GraphFile, threads: int | None):
        self.path = path
        declared = graph.signature
        self.model = check_graph(path, graph.sha256, declared)
        self.computed = widened(self.model)
        self.inputs, self.slots, self.outputs = (
            tuple(replace(io, dtype=widened_dtype(io.dtype)) for io in ios)
            for ios in (declared.inputs, declared.slots, declared.outputs)
        )
        self.signature = Signature(self.inputs, self.outputs, self.slots)
        self._threads = threads
        self._session: ort.InferenceSession | None = None

    @property
    def session(self) -> ort.InferenceSession:
        if self._session is None:
            source = self.path if self.computed is self.model else self.computed.SerializeToString()
            self._session = open_session(source, self._threads)
        return self._session

    @contextlib.contextmanager
    def computed_file(self) -> Iterator[Path]:
        """A file of the graph as it is computed, for as long as it is looked at."""
        if self.computed is self.model:
            yield self.path
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / self.path.name
            file.write_bytes(self.computed.SerializeToString())
            yield file

    def run(
        self, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Outputs by name. Raises CheckError for arrays that are not those declared, and when the library cannot run
        the graph."""
        weights = weights or {}
        dims = check_arrays(str(self.path), "input", self.inputs, inputs)
        check_arrays(str(self.path), "slot", self.slots, weights, dims)
        try:
            arrays = self.session.run(None, {**inputs, **weights})
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise CheckError(
                f"{self.path}: ONNX Runtime cannot run this graph: {' '.join(str(error).split())}"
            ) from error
        found = dict(zip([value.name for value in self.session.get_outputs()], arrays))
        check_arrays(str(self.path), "output", self.outputs, found, dims)
        return found


class Graphs:
    """An assembly with its graphs and its weights, cut after the first `num_layers` layers."""

    def __init__(self, path: Path, assembly: Assembly, weights: Weights, layers: int | str, threads: int | None = None):
        """Raises InputError for weights of another precision and for a layer count that the model does not have."""
        self.path, self.assembly, self.weights = path, assembly, weights
        if weights.precision != assembly.precision:
            raise InputError(
                f"{weights.manifest_path}: precision: expected {assembly.precision} as in {path}, found "
                f"{weights.precision}; "
                "give the weights of this precision"
            )
        self.num_layers = layer_count(assembly, layers)
        self.dtype = np.dtype(widened_dtype(assembly.dtype))
        self.layers = assembly.layers[: self.num_layers]
        self.exit = self.layers[-1].exit
        self.embedding = assembly.embedding
        parts = (self.embedding, self.exit, *(layer.block for layer in self.layers))
        opened = lambda graph: Graph(path.parent / graph.file, graph, threads)
        self.classes = {name: opened(assembly.classes[name]) for name in sorted({part.graph for part in parts})}
        self.pieces: dict[str, Graph] = {}
        self._noise: dict[str, dict[str, np.ndarray]] = {}
        self.attention = {
            f"{name}.{phase}": opened(graph)
            for name in sorted({layer.variant for layer in self.layers})
            for phase, graph in assembly.variants[name].phases().items()
        }
        if (ranks := assembly.tensor_parallel) is not None:
            used = {piece.graph for name in self.classes.keys() & ranks.classes for piece in ranks.classes[name].pieces}
            self.pieces = {name: opened(ranks.graphs[name]) for name in sorted(used)}
            self.pieces |= {name: opened(graph) for name, graph in ranks.all_graphs() if name in self.attention}
        for part in parts:
            check_slots(weights, part.slots, assembly.classes[part.graph].signature.slots, part.graph)

    def graphs(self) -> dict[str, Graph]:
        """All graphs in use by name: classes, then `<variant>.<phase>`; then those of a rank."""
        return {**self.classes, **self.attention, **{f"{name} of a rank": graph for name, graph in self.pieces.items()}}

    def carries(self, part: BoundBlock) -> list[str]:
        """What a block hands on to the next besides query, key and value: `hidden` alone in most models."""
        return [io.key for io in self.classes[part.graph].outputs if io.key != io.name]

    def run_block(self, part: BoundBlock, env: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a block on what it names of `env`. Outputs by the name under which the next block reads them
        (`hidden_out` as `hidden`). Of a model split over ranks: all ranks, one after another."""
        graph, ranks = self.classes[part.graph], self.assembly.tensor_parallel
        env = {**env, **self._no_adapter(part.graph, env)}
        weights = {slot.name: self.slot_array(part.slots[slot.name], slot) for slot in graph.slots}
        if ranks is None or part.graph not in ranks.classes:
            outputs = _run(graph, env, weights)
        else:
            sharded = ranks.classes[part.graph]

            def run(piece: str, rank: int, known: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
                own = {slot.name: sharded.take_weight(slot.name, weights[slot.name], rank) for slot in of[piece].slots}
                return _run(of[piece], known, {name: np.ascontiguousarray(array) for name, array in own.items()})

            of, inputs = self.pieces, {io.name: env[io.name] for io in graph.inputs}
            outputs = run_sharded_block(sharded, graph.signature, ranks.degree, inputs, run)
        return {name.removesuffix("_out"): value for name, value in outputs.items()}

    def _no_adapter(self, name: str, env: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a block with adapters reads of them, for tokens without one: in every place lie numbers that none of
        them may see."""
        if self.assembly.adapters is None:
            return {}
        if name not in self._noise:
            random = np.random.default_rng(0)
            shapes = self.assembly.adapters.shapes(name)
            self._noise[name] = {
                key: random.standard_normal(shape, np.float32).astype(self.dtype) for key, shape in shapes
            }
        tokens = next(len(env[key]) for key in ("token_ids", "hidden", "position_ids") if key in env)
        return {**self._noise[name], IDS: np.full(tokens, -1, np.int64)}

    def run_attention(self, variant: str, phase: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a variant's prefill or decode graph on what it names of `inputs` (one without RoPE may need no
        position_ids): `attention`, `key_out`, `value_out`."""
        graph, ranks, name = self.attention[f"{variant}.{phase}"], self.assembly.tensor_parallel, f"{variant}.{phase}"
        if ranks is None:
            return _run(graph, inputs)
        shards = attention_shards(self.assembly.variants[variant], ranks.degree)
        given = {io.name: inputs[io.name] for io in graph.inputs if io.name in inputs}
        run = lambda name, rank, known: _run(self.pieces[name], known)
        return run_sharded_attention(ranks, name, graph.signature, shards, given, run)

    def slot_array(self, tensors: Sequence[str], slot: IO) -> np.ndarray:
        """The weights of a slot of one of the graphs, in the dtype that it is computed in."""
        return slot_array(self.weights, tensors, slot.sizes).astype(slot.dtype, copy=False)

    def forward_inputs(self) -> list[IO]:
        """What a whole forward takes: hidden, position_ids, logit_rows."""
        hidden = self.classes[self.layers[0].block.graph].inputs[0]
        rows = next(io for io in self.classes[self.exit.graph].inputs if io.name == "logit_rows")
        return [hidden, IO("position_ids", "int64", ("num_tokens",)), rows]

    def uncut(self, threads: int | None = None) -> Graph | None:
        """The uncut graph, its weight inputs (named as in the checkpoint) as slots; None when the model is cut, for it
        has all layers."""
        uncut = self.assembly.batchful
        if uncut is None or self.num_layers < len(self.assembly.layers):
            return None
        return Graph(self.path.parent / uncut.file, uncut, threads)


def _run(
    graph: Graph, env: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Run a graph on those of `env` that it declares as inputs."""
    missing = [io.name for io in graph.inputs if io.name not in env]
    if missing:
        known = ", ".join(sorted(env))
        raise CheckError(
            f"{graph.path}: expected inputs that a decoder step has ({known}), found {', '.join(missing)}; export again"
        )
    return graph.run({io.name: env[io.name] for io in graph.inputs}, weights)
