"""The module `tensorrt` over the fake device: engines that ONNX Runtime runs."""

from __future__ import annotations

import enum
import importlib.machinery
import json
import weakref
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx

from fake_gpu.device import POISON, Fault, Gpu
from lockstep.backends.profiles import built_limits, profiles
from lockstep.onnx_tools.sessions import open_session

KINDS = enum.Enum("DataType", "FLOAT HALF INT32 INT8 UINT8 BOOL BF16 INT64 INT4")
MODES = enum.Enum("TensorIOMode", "INPUT OUTPUT")


class Engine:
    """ICudaEngine of a graph whose profiles are made for the limits that it carries."""

    def __init__(self, gpu: Gpu, data: bytes):
        self.gpu = gpu
        self.model = onnx.ModelProto.FromString(data)
        self.session = open_session(data)
        self.home = gpu.device
        self.profiles = profiles(self.model, built_limits(json.loads(self.model.metadata_props[-1].value)))
        self.num_optimization_profiles = len(self.profiles)
        self.names = [value.name for value in (*self.model.graph.input, *self.model.graph.output)]
        self.values = dict(zip(self.names, (*self.model.graph.input, *self.model.graph.output)))
        self.num_io_tensors = len(self.names)
        self.device_memory_size_v2 = len(data)

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_mode(self, name):
        return MODES.INPUT if any(value.name == name for value in self.model.graph.input) else MODES.OUTPUT

    def get_tensor_dtype(self, name):
        integers = {7: KINDS.INT64, 3: KINDS.INT8, 22: KINDS.INT4}
        return {1: KINDS.FLOAT, 10: KINDS.HALF, **integers}[self.values[name].type.tensor_type.elem_type]

    def get_tensor_shape(self, name):
        return tuple(-1 if dim.dim_param else dim.dim_value for dim in self.values[name].type.tensor_type.shape.dim)

    def get_tensor_profile_shape(self, name, profile):
        return self.profiles[profile].get(name, (self.get_tensor_shape(name),) * 3)

    def get_tensor_format(self, name, profile):
        return "linear"

    def is_shape_inference_io(self, name):
        return False

    def create_execution_context(self, strategy=None):
        """Without a strategy, the context allocates its own memory."""
        return Context(self, strategy is None)


class Context:
    """IExecutionContext: wants one run outside of a capture after its shapes were set."""

    def __init__(self, engine: Engine, own_memory: bool = False):
        self.engine = engine
        self.active_optimization_profile = 0
        self.ready = False
        self.allocator = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        # Dies with the context and no sooner. The collector clears weak references before it runs finalizers, one of
        # which waits for streams, but not those to objects that it does not track, such as an array.
        self._life = np.empty(0)
        self.addresses: dict[str, int] = {}
        self.memory = None if own_memory else (0, 0)  # address, size

    def set_device_memory(self, address, size):
        if size < self.engine.device_memory_size_v2:
            raise Fault(f"{size} bytes of device memory, {self.engine.device_memory_size_v2} needed")
        self.memory = address, self.engine.device_memory_size_v2

    def set_optimization_profile_async(self, number, stream):
        self.active_optimization_profile = number
        self.ready = False
        self.shapes.clear()
        self.engine.gpu.profiles.append(number)
        return True

    def get_tensor_shape(self, name):
        """Of outputs too, once their dimensions are known from inputs."""
        if self.engine.get_tensor_mode(name) == MODES.INPUT:
            return self.shapes.get(name, self.engine.get_tensor_shape(name))
        sizes = {}
        for tensor, shape in self.shapes.items():
            sizes |= {dim.dim_param: size for dim, size in zip(self._dims(tensor), shape)}
        return tuple(sizes.get(dim.dim_param, -1) if dim.dim_param else dim.dim_value for dim in self._dims(name))

    def _dims(self, name):
        return self.engine.values[name].type.tensor_type.shape.dim

    def get_tensor_address(self, name):
        return self.addresses.get(name, 0)

    def set_output_allocator(self, name, allocator):
        self.allocator = allocator
        return True

    def set_input_shape(self, name, shape):
        if self.shapes.get(name) != tuple(shape):
            self.shapes[name] = tuple(shape)
            self.ready = False
        low, _, high = self.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        return all(minimum <= size <= maximum for minimum, size, maximum in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        gpu = self.engine.gpu
        engine = self.engine
        if gpu.capturing(stream) and not self.ready:
            return False
        gpu.plain += not gpu.capturing(stream)
        self.ready = True
        life = weakref.ref(self._life)
        captured = gpu.capturing(stream)
        last = self.shapes
        shapes = dict(self.shapes)
        addresses = dict(self.addresses)
        memory = self.memory
        allocator = self.allocator
        kinds = {KINDS.FLOAT: "f4", KINDS.HALF: "f2", KINDS.INT32: "i4", KINDS.INT64: "i8", KINDS.INT8: "i1"}

        def dtype(name: str) -> str:
            return kinds[engine.get_tensor_dtype(name)]

        def run() -> None:
            if captured and (life() is None or last != shapes):
                raise Fault("the context of a captured run is gone, or has other shapes")
            if memory is not None:
                gpu.bytes(*memory)[:] = POISON
            feeds = {}
            places = []
            for value in engine.session.get_inputs():
                array = gpu.array(
                    addresses[value.name],
                    shapes.get(value.name, engine.get_tensor_shape(value.name)),
                    dtype(value.name),
                )
                places.append((addresses[value.name], addresses[value.name] + array.nbytes))
                feeds[value.name] = array.astype(np.int64) if array.dtype in (np.int32, np.int64) else array
            for value, result in zip(engine.session.get_outputs(), engine.session.run(None, feeds)):
                if allocator is None:
                    to = addresses[value.name]
                else:
                    to = allocator.reallocate_output(value.name, 0, result.nbytes, 256)
                    allocator.notify_shape(value.name, result.shape)
                if any(low < to + result.nbytes and to < high for low, high in places):
                    raise Fault(f"output {value.name} lies on an input")
                gpu.array(to, result.shape, dtype(value.name))[:] = result

        gpu.launch(stream, engine.home, run)
        if allocator is not None:  # the host is told of the outputs
            gpu.synchronize(stream)
        return True


def tensorrt(gpu: Gpu, version: str) -> ModuleType:
    """The module `tensorrt` of a version."""
    trt = ModuleType("tensorrt")
    trt.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)

    class Runtime:
        def __init__(self, logger):
            pass

        def deserialize_cuda_engine(self, data):
            return Engine(gpu, data)

    logger = type("ILogger", (), {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2})
    vars(trt).update(
        __version__=version, DataType=KINDS, TensorIOMode=MODES,
        TensorFormat=SimpleNamespace(LINEAR="linear", HWC="hwc", CHW16="chw16"), ICudaEngine=Engine,
        IExecutionContext=Context, IOutputAllocator=type("IOutputAllocator", (), {}), Runtime=Runtime, ILogger=logger,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2), float32=KINDS.FLOAT, float16=KINDS.HALF,
        int32=KINDS.INT32, int8=KINDS.INT8, uint8=KINDS.UINT8, bool=KINDS.BOOL, bfloat16=KINDS.BF16, int64=KINDS.INT64,
    )  # fmt: skip
    return trt
