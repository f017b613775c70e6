"""A stand-in for TensorRT 8.6 and CUDA on a machine without a GPU: a script that builds an engine set with it and
compares it.

    python standin_tensorrt.py < request.json    {"assembly", "weights", "folder", "options", "tolerance", "fault"}

A plan is the ONNX graph that the builder asked to build (lowered, fused), run by ONNX Runtime; device memory is the
host's. All else is real: how graphs are prepared, rotary encodings, Polygraphy's TrtRunner, the calls of CUDA, bindings
by address, profiles. As 8.6 does, integers are int32, and shapes outside of the profile that is set are refused.
"""

from __future__ import annotations

import ctypes
import enum
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx

KINDS = enum.Enum("DataType", "FLOAT HALF INT32 INT8 UINT8 BOOL")
MODES = enum.Enum("TensorIOMode", "INPUT OUTPUT")
CALLS: list[str] = []
memory: dict[int, ctypes.Array] = {}


def cuda_runtime() -> ModuleType:
    def allocate(nbytes):
        block = ctypes.create_string_buffer(max(1, nbytes))
        memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def copy(to, source, nbytes, kind, stream=None):
        assert isinstance(kind, Copies)
        ctypes.memmove(to, source, nbytes)
        return (0,)

    Copies = enum.IntEnum(
        "cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2, "cudaMemcpyDeviceToDevice": 3}
    )
    runtime = ModuleType("cuda.bindings.runtime")
    runtime.cudaMemcpyKind, runtime.cudaMalloc, runtime.cudaMemcpy, runtime.cudaMemcpyAsync = (
        Copies,
        allocate,
        copy,
        copy,
    )
    runtime.cudaFree = lambda address: (memory.pop(address, None), (0,))[1]
    runtime.cudaStreamCreate = lambda: (0, 7)
    runtime.cudaStreamSynchronize = runtime.cudaStreamDestroy = lambda stream: (int(stream != 7),)
    runtime.cudaMallocHost = runtime.cudaFreeHost = None  # named, never called here
    return runtime


class Engine:
    """ICudaEngine: what Polygraphy and `compat.tensors` read of one."""

    def __init__(self, model: onnx.ModelProto, profiles: list):
        self.model, self.profiles, self.num_optimization_profiles = model, profiles, len(profiles)
        self.values = {value.name: value for value in (*model.graph.input, *model.graph.output)}
        self.num_io_tensors = len(self.values)

    def get_tensor_name(self, index):
        return list(self.values)[index]

    def get_tensor_mode(self, name):
        return MODES.INPUT if any(value.name == name for value in self.model.graph.input) else MODES.OUTPUT

    def get_tensor_dtype(self, name):
        return {1: KINDS.FLOAT, 10: KINDS.HALF, 7: KINDS.INT32}[self.values[name].type.tensor_type.elem_type]

    def get_tensor_shape(self, name):
        return tuple(-1 if dim.dim_param else dim.dim_value for dim in self.values[name].type.tensor_type.shape.dim)

    def get_tensor_profile_shape(self, name, profile):
        return self.profiles[profile].get(name, (self.get_tensor_shape(name),) * 3)

    def get_tensor_format(self, name, profile):
        return "linear"

    def is_shape_inference_io(self, name):
        return False

    def create_execution_context(self):
        return Context(self)


class Context:
    """IExecutionContext."""

    def __init__(self, engine):
        self.engine, self.active_optimization_profile, self.shapes, self.addresses = engine, 0, {}, {}

    def set_optimization_profile_async(self, number, stream):
        self.active_optimization_profile = number
        CALLS.append(f"profile {number}")
        return True

    def get_tensor_shape(self, name):
        return self.shapes.get(name, self.engine.get_tensor_shape(name))

    def set_input_shape(self, name, shape):
        low, _, high = self.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        self.shapes[name] = tuple(shape)
        return all(least <= size <= most for least, size, most in zip(low, shape, high))

    def get_tensor_address(self, name):
        return self.addresses.get(name, 0)

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def set_output_allocator(self, name, allocator):
        self.allocator = allocator
        return True

    def execute_async_v3(self, stream):
        from lockstep.onnx_tools.sessions import open_session

        session = open_session(self.engine.model.SerializeToString())
        feeds = {}
        for value in session.get_inputs():
            dtype = {KINDS.FLOAT: "f4", KINDS.HALF: "f2", KINDS.INT32: "i4"}[self.engine.get_tensor_dtype(value.name)]
            shape = self.get_tensor_shape(value.name)
            data = ctypes.string_at(self.addresses[value.name], int(np.prod(shape)) * np.dtype(dtype).itemsize)
            array = np.frombuffer(data, dtype).reshape(shape)
            feeds[value.name] = array.astype(np.int64) if dtype == "i4" else array
        for value, array in zip(session.get_outputs(), session.run(None, feeds)):
            array = np.ascontiguousarray(array)
            ctypes.memmove(
                self.allocator.reallocate_output(value.name, 0, array.nbytes, 256), array.ctypes.data, array.nbytes
            )
            self.allocator.notify_shape(value.name, array.shape)
        return True


def tensorrt() -> ModuleType:
    trt = ModuleType("tensorrt")
    trt.__version__, trt.DataType, trt.TensorIOMode, trt.ICudaEngine, trt.IExecutionContext = (
        "8.6.0",
        KINDS,
        MODES,
        Engine,
        Context,
    )
    trt.float32, trt.float16, trt.int32, trt.int8, trt.uint8, trt.bool = KINDS
    trt.TensorFormat = SimpleNamespace(LINEAR="linear", HWC="hwc", CHW16="chw16")
    trt.IOutputAllocator = type("IOutputAllocator", (), {})
    return trt


def main() -> None:
    request = json.load(sys.stdin)
    runtime, bindings = cuda_runtime(), ModuleType("cuda.bindings")
    bindings.runtime, bindings.driver, bindings.nvrtc = runtime, ModuleType("driver"), ModuleType("nvrtc")
    cudnn = ModuleType("cudnn")
    cudnn.backend_version, cudnn.create_handle, cudnn.destroy_handle = lambda: 91900, object, lambda handle: None
    bindings.nvrtc.nvrtcVersion = lambda: (0, 12, 9)
    sys.modules |= {"cudnn": None if request["fault"] == "cudnn" else cudnn}
    sys.modules |= {
        "tensorrt": tensorrt(),
        "cuda": ModuleType("cuda"),
        "cuda.bindings": bindings,
        "cuda.bindings.runtime": runtime,
    }

    from lockstep import backends
    from lockstep.artifacts.files import sha256_file
    from lockstep.backends import EngineSet
    from lockstep.backends.base import Built
    from lockstep.backends.profiles import profiles
    from lockstep.backends.tensorrt import backend, compat
    from lockstep.backends.tensorrt.rotation import read_rotation
    from lockstep.errors import guard
    from lockstep.verify.compare import run

    device = {"type": "gpu", "name": "none", "compute_capability": "8.0", "driver": "0"}
    backend.describe_gpu = lambda: device
    made = {**backend.TensorRTBackend().default_options(), **request["options"]}

    real = backend.TensorRTBackend.build

    def build(self, graph_path: Path, out_path: Path, options) -> Built:
        if out_path.suffix != ".engine":
            return real(self, graph_path, out_path, options)
        out_path.write_bytes(graph_path.read_bytes())
        digest = self._tactics.take(out_path.stem, sha256_file(graph_path), [], str(out_path))
        self._tactics.take_cache(b"cache", {}, str(out_path))
        return Built({"tactics_sha256": digest})

    def deserialize(data: bytes, where: str) -> Engine:
        model = onnx.ModelProto.FromString(data)
        bounds = profiles(model, made)
        return Engine(model, bounds[::-1] if request["fault"] == "profiles" else bounds)

    backend.TensorRTBackend.build, compat.deserialize = build, deserialize
    with guard():
        folder = Path(request["folder"])
        engines = backends.build(request["assembly"], "tensorrt", folder / "engines.json", request["options"])
        run(
            Path(request["assembly"]),
            Path(request["weights"]),
            engines,
            request["tolerance"],
            {},
            folder / "compare.json",
        )
        opened = EngineSet.open(engines, request["assembly"])
        files = {
            name: folder / entry["file"]
            for name, entry in opened.manifest["engines"].items()
            if entry["file"].endswith(".onnx")
        }
        read = {name: read_rotation(opened.load(name).bind(None, {}), 8, name) for name in files}
    rotations = {
        name: {"partner": tables.partner.tolist(), "own": tables.own[:, 0].tolist()} for name, tables in read.items()
    }
    choices = {name: opened.backend.choices(file)["operators"] for name, file in files.items()}
    print(json.dumps({"calls": CALLS, "left": len(memory), "rotations": rotations, "choices": choices}))


if __name__ == "__main__":
    main()
