"""The assembly's graphs as callables: one ONNX Runtime session for each graph, weights given as inputs.

Graph optimisation is off: what is validated is the graph as exported. What a backend makes of it is the golden check's
to judge. ONNX Runtime has no bf16 on a CPU: such graphs are computed in fp32, on the weights in bf16.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened
from lockstep.verify.validate.gate import check_arrays, check_graph
from lockstep.weights import Weights, check_slots, slot_array


class Graph:
    """One graph of the assembly, its file checked: `run` takes and gives arrays by name, exactly those declared;
    float32 for bfloat16."""

    def __init__(self, path: Path, entry: Mapping[str, Any], threads: int | None):
        self.path = path
        declared = [entry["inputs"], entry.get("slots", ()), entry["outputs"]]
        self.model = check_graph(path, entry["sha256"], [*declared[0], *declared[1]], declared[2])
        self.computed = widened(self.model)
        self.inputs, self.slots, self.outputs = (tuple(map(_computed, ios)) for ios in declared)
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


class Assembly:
    """An assembly with its graphs and its weights, cut after the first `num_layers` layers."""

    def __init__(
        self, path: Path, manifest: Mapping[str, Any], weights: Weights, layers: int | str, threads: int | None = None
    ):
        """Raises InputError for weights of another precision and for a layer count that the model does not have."""
        self.path, self.manifest, self.weights = path, manifest, weights
        if weights.precision != manifest["precision"]:
            raise InputError(
                f"{weights.manifest_path}: precision: expected {manifest['precision']} as in {path}, found "
                f"{weights.precision}; "
                "give the weights of this precision"
            )
        depth = manifest["num_layers"]
        if layers != "all" and (not isinstance(layers, int) or not 1 <= layers <= depth):
            raise InputError(f"layers: expected 1 to {depth} or 'all', found {layers!r}")
        self.num_layers: int = layers if isinstance(layers, int) else depth
        self.dtype = np.dtype(_computed(manifest)["dtype"])
        self.layers = manifest["layers"][: self.num_layers]
        self.exit = self.layers[-1]["exit"]
        self.embedding = manifest["embedding"]
        used = {part["class"] for part in (self.embedding, self.exit, *(layer["block"] for layer in self.layers))}
        self.classes = {
            name: Graph(path.parent / manifest["classes"][name]["graph"], manifest["classes"][name], threads)
            for name in sorted(used)
        }
        self.kinds = {
            (name, phase): Graph(
                path.parent / manifest["kinds"][name][phase]["graph"], manifest["kinds"][name][phase], threads
            )
            for name in sorted({layer["kind"] for layer in self.layers})
            for phase in ("prefill", "decode")
        }
        for part in (self.embedding, self.exit, *(layer["block"] for layer in self.layers)):
            check_slots(weights, part["slots"], manifest["classes"][part["class"]].get("slots", ()), part["class"])

    def graphs(self) -> dict[str, Graph]:
        """All graphs in use by name: classes, then `<kind>.<phase>`."""
        return {**self.classes, **{f"{name}.{phase}": graph for (name, phase), graph in self.kinds.items()}}

    def carries(self, part: Mapping[str, Any]) -> list[str]:
        """What a block hands on to the next besides query, key and value: `hidden` alone in most models."""
        names = [io["name"] for io in self.classes[part["class"]].outputs]
        return [name.removesuffix("_out") for name in names if name.endswith("_out")]

    def run_block(self, part: Mapping[str, Any], env: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a block on what it names of `env`. Outputs by the name under which the next block reads them
        (`hidden_out` as `hidden`)."""
        outputs = _run(self.classes[part["class"]], env, self._tensors(self.classes[part["class"]], part["slots"]))
        return {name.removesuffix("_out"): value for name, value in outputs.items()}

    def run_kind(self, kind: str, phase: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a kind's prefill or decode graph on what it names of `inputs` (a kind without rotary encoding may need no
        position_ids): `attention`, `key_out`, `value_out`."""
        return _run(self.kinds[kind, phase], inputs)

    def _tensors(self, graph: Graph, slots: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
        return {slot["name"]: self.slot_array(slots[slot["name"]], slot) for slot in graph.slots}

    def slot_array(self, tensors: Sequence[str], slot: Mapping[str, Any]) -> np.ndarray:
        """The weights of a slot of one of the graphs, in the dtype that it is computed in."""
        return slot_array(self.weights, tensors, slot["shape"]).astype(slot["dtype"], copy=False)

    def forward_inputs(self) -> list[dict[str, Any]]:
        """What a whole forward takes: hidden, position_ids, logit_rows, as the assembly's entries of inputs."""
        hidden = self.classes[self.layers[0]["block"]["class"]].inputs[0]
        rows = next(io for io in self.classes[self.exit["class"]].inputs if io["name"] == "logit_rows")
        return [dict(hidden), {"name": "position_ids", "dtype": "int64", "shape": ["num_tokens"]}, dict(rows)]

    def uncut(self, threads: int | None = None) -> Graph | None:
        """The uncut graph, its weight inputs (named as in the checkpoint) as slots; None when the model is cut, for it
        has all layers."""
        if self.num_layers < self.manifest["num_layers"]:
            return None
        entry = self.manifest["batchful"]
        return Graph(self.path.parent / entry["graph"], entry, threads)


def _computed(io: Mapping[str, Any]) -> dict[str, Any]:
    return {**io, "dtype": "float32"} if io["dtype"] == "bfloat16" else dict(io)


def _run(
    graph: Graph, env: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Run a graph on those of `env` that it declares as inputs."""
    missing = [io["name"] for io in graph.inputs if io["name"] not in env]
    if missing:
        known = ", ".join(sorted(env))
        raise CheckError(
            f"{graph.path}: expected inputs that a decoder step has ({known}), found {', '.join(missing)}; export again"
        )
    return graph.run({io["name"]: env[io["name"]] for io in graph.inputs}, weights)
