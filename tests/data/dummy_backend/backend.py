"""A backend in the least code: its engines are the graphs, and ONNX's reference implementation runs them in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import write_bytes
from lockstep.artifacts.signature import IO
from lockstep.backends.base import Built
from lockstep.backends.host import HostBackend
from lockstep.onnx_tools.signature import dtype_name
from lockstep.weights import Weights, slot_array


class DummyBackend(HostBackend):
    name = "dummy"
    suffixes = (".dummy",)
    revision = 1
    precisions = ("fp32",)
    batch_invariant = False

    def version(self) -> str:
        return onnx.__version__

    def describe_device(self) -> dict[str, Any]:
        return {"type": "numpy"}

    def device_key(self, device: Mapping[str, Any]) -> Any:
        return dict(device)

    def default_options(self) -> dict[str, Any]:
        return {"checked": True, "fuse_projections": False}

    def graphs(self, assembly: Assembly, options: Mapping[str, Any]) -> Any:
        return assembly.graphs()

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        if options["checked"]:
            onnx.checker.check_model(graph_path)
        write_bytes(out_path, graph_path.read_bytes())
        return Built()

    def load(self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0) -> Any:
        return DummyProgram(engine_path, {slot.name: slot.sizes for slot in slots})


BACKEND = DummyBackend


class DummyProgram:
    def __init__(self, path: Path, slots: Mapping[str, Sequence[int]]) -> None:
        self._path = path
        self._slots = slots
        self._model = _opened(path)
        self._evaluator = ReferenceEvaluator(self._model)

    def bind(self, weights: Weights | None, slots: Mapping[str, Sequence[str]]) -> DummyExecutable:
        values = {slot: slot_array(weights, tensors, self._slots[slot]) for slot, tensors in slots.items() if weights}
        return DummyExecutable(self._evaluator, self._model.graph, values, str(self._path))


class DummyExecutable:
    def __init__(self, evaluator: ReferenceEvaluator, graph: Any, values: Mapping[str, np.ndarray], where: str) -> None:
        self._evaluator = evaluator
        self._values = values
        self.where = where
        self.inputs = {value.name: _declared(value) for value in graph.input if value.name not in values}
        self.outputs = {value.name: _declared(value) for value in graph.output}

    def prepare(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Any:
        def run() -> None:
            for array, values in zip(outputs.values(), self._evaluator.run(list(outputs), {**inputs, **self._values})):
                array[...] = values

        return run


def _declared(value: onnx.ValueInfoProto) -> SimpleNamespace:
    kind = value.type.tensor_type
    shape = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
    return SimpleNamespace(dtype=np.dtype(dtype_name(kind.elem_type)), shape=shape)


def _opened(path: Path) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(path.read_bytes())
