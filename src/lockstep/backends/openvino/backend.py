"""The OpenVINO backend on a CPU; bound weights are constants on the mapped checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lockstep.artifacts.dtypes import named_dtype
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import write_bytes
from lockstep.artifacts.signature import IO
from lockstep.backends.base import Built
from lockstep.backends.cpu import describe_cpu, thread_count
from lockstep.backends.host import Declared, HostBackend
from lockstep.backends.openvino import ir
from lockstep.backends.openvino.cpu import why_not
from lockstep.backends.openvino.library import CORE, VERSION, one_line, openvino, replace, tensor_on, type_name
from lockstep.backends.openvino.quantized import group_size
from lockstep.errors import CheckError, InputError
from lockstep.step.executable import Call, check_bound
from lockstep.weights import Tensors, WeightInputs, check_arrays, check_bound_slots, check_inputs, slot_array


class OpenVINOBackend(HostBackend):
    """OpenVINO's CPU plugin; precision is the graph's. Engines are the same bytes on every CPU, results are not."""

    name = "openvino"
    suffixes = (".zip",)
    revision = 3
    portable = True
    precisions = ("fp32", "bf16", "w8a16", "w4a16", "w8a8", "w4a8")

    def __init__(self) -> None:
        # Measured there; OpenVINO has other kernels for CPUs with AMX, and for those without AVX-512.
        flags = describe_cpu()["isa"]
        self.batch_invariant = "avx512f" in flags and "amx_tile" not in flags

    def file(self, name: str) -> str:
        return f"{name}.ir.zip"

    def version(self) -> str:
        return VERSION

    def default_options(self) -> dict[str, Any]:
        return {"fuse_projections": False}

    def start(self, folder: Path, manifest: EngineSetManifest, names: Sequence[str]) -> None:
        _require(manifest.precision, str(folder))

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        out_path.parent.mkdir(parents=True, exist_ok=True)
        model = ir.convert(onnx.load(graph_path, load_external_data=False), str(graph_path))
        write_bytes(out_path, ir.to_bytes(model, out_path.parent))
        return Built()

    def load(
        self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0
    ) -> OpenVINOProgram:
        """Load an engine file. low_memory has no effect: OpenVINO always has one, reordered copy of each matrix."""
        return OpenVINOProgram(engine_path, slots, thread_count(threads))


BACKEND = OpenVINOBackend


class OpenVINOProgram:
    """An engine file; `bind` compiles it."""

    def __init__(self, engine_path: Path, slots: Sequence[IO], threads: int):
        self._path = engine_path
        self._threads = threads
        self._model = ir.from_file(engine_path)
        self._group_size = group_size(self._model)
        inputs = {value.any_name: value.element_type for value in self._model.inputs}
        self._weights = WeightInputs(slots, inputs)
        check_inputs(self._weights.declared, inputs, str(engine_path))
        if any(kind == openvino.Type.bf16 for kind in inputs.values()):
            _require("bf16", str(engine_path))

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> OpenVINOExecutable:
        check_bound_slots(self._weights.slots, slots, str(self._path))
        if weights is not None:
            weights, slots = self._weights.bind(weights, slots, str(self._path))
        model = self._model.clone()
        arrays = []
        for parameter in model.get_parameters():
            slot = parameter.output(0).get_any_name()
            if slot in slots:
                assert weights is not None  # the caller's part: see Program.bind
                array = self._array(weights, slot, slots[slot])
                arrays.append(array)
                tensor = tensor_on(array, list(parameter.get_output_shape(0)), parameter.get_element_type())
                replace(parameter.output(0), openvino.op.Constant(tensor, True).output(0))
                model.remove_parameter(parameter)
        names = [value.any_name for value in model.inputs], [value.any_name for value in model.outputs]
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self._group_size,  # of activations, in products with quantised weights
            "INFERENCE_NUM_THREADS": self._threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        try:
            compiled = CORE.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise CheckError(f"{self._path}: OpenVINO {VERSION} cannot load this engine: {one_line(error)}") from error
        return OpenVINOExecutable(compiled, names, arrays, str(self._path), self._threads)

    def _array(self, weights: Tensors, slot: str, names: Sequence[str]) -> np.ndarray:
        """Return the array of a slot: a view of the checkpoint where it is one tensor."""
        shape, dtype = self._weights.declared[slot]
        check_arrays([weights[name] for name in names], shape, dtype, f"{self._path}: slot {slot}")
        return slot_array(weights, names, shape)


class OpenVINOExecutable:
    """A compiled model, and the arrays that it may read in place."""

    def __init__(
        self,
        compiled: Any,
        names: tuple[Sequence[str], Sequence[str]],
        arrays: Sequence[np.ndarray],
        where: str,
        threads: int,
    ):
        self.compiled = compiled
        self.bound_arrays = arrays
        self.where = where
        self._threads = threads
        # By order: a compiled value that is two outputs has the names of both.
        self.inputs = {name: _declared(value) for name, value in zip(names[0], compiled.inputs, strict=True)}
        self.outputs = {name: _declared(value) for name, value in zip(names[1], compiled.outputs, strict=True)}

    def prepare(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Call:
        request = self.compiled.create_infer_request()
        check_bound(inputs, self.inputs, self.where)
        check_bound(outputs, self.outputs, self.where)
        try:
            for index, name in enumerate(self.inputs):
                request.set_input_tensor(index, tensor_on(inputs[name]))
            for index, name in enumerate(self.outputs):
                request.set_output_tensor(index, tensor_on(outputs[name]))
        except RuntimeError as error:  # another shape than the engine's
            raise self._failure(error) from error
        infer = self._infer(request)

        def call(buffers: object = (*inputs.values(), *outputs.values())) -> None:
            """Run the model; `buffers` keeps the memory alive: a request has addresses only."""
            try:
                infer()
            except RuntimeError as error:
                raise self._failure(error) from error

        return call

    def _infer(self, request: Any) -> Call:
        if self._threads > 1:
            return functools.partial(request.infer, share_outputs=True)

        def infer() -> None:
            """Wait for the call: in one thread `request.infer` (2026.4.1) returns as if one that failed were done."""
            request.start_async()
            request.wait()

        return infer

    def _failure(self, error: RuntimeError) -> CheckError:
        return CheckError(f"{self.where}: OpenVINO {VERSION} cannot run this engine: {one_line(error)}")


def _declared(value: Any) -> Declared:
    shape = list[int | str]()
    for dim in value.partial_shape:
        shape.append(dim.get_length() if dim.is_static else "any")
    return Declared(named_dtype(type_name(value.element_type)), shape)


def _require(precision: str, where: str) -> None:
    """Raise InputError where the CPU here does not compute in the precision."""
    if reason := why_not(precision):
        raise InputError(f"{where}: backend openvino: {precision}: {reason}; use fp32, or another machine")
