"""TensorRT 10.3 to 11.x behind one class, the only module that imports it."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.dtypes import named_dtype
from lockstep.errors import CheckError, InputError
from lockstep_gpu.compute_capability import compute_capability
from lockstep_gpu.tensor import Tensor

if TYPE_CHECKING:
    import tensorrt as trt

Version = tuple[int, int]

# "The timing cache will not be used!", "The incoming cache will not be used!", "Timing cache ... mismatch", "Failed to
# deserialize timing cache. Returning an empty timing cache.": only logged, as an error or a warning, while the build
# continues.
REFUSED_CACHE = re.compile(
    r"timing cache.*(not be used|mismatch|corrupt|invalid|different|empty)"
    r"|(mismatch|corrupt|invalid|failed to deserialize).*timing cache|incoming cache.*not be used",
    re.IGNORECASE | re.DOTALL,
)

EDITABLE_CACHE = (10, 8)  # the first version whose timing caches have entries that can be read


class GraphRefusedError(CheckError):
    """TensorRT does not build a graph, or not in its precision."""


class Log:
    """The errors and warnings of TensorRT since `clear`, in order: one for the process, as TensorRT has it."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def clear(self) -> None:
        self.errors.clear()
        self.warnings.clear()

    def first(self, pattern: re.Pattern) -> str | None:
        """Return the first error or warning that matches the pattern, on one line; None where none does."""
        return next((" ".join(text.split()) for text in (*self.errors, *self.warnings) if pattern.search(text)), None)

    def first_error(self) -> str:
        """Return the first error, else the first warning, on one line."""
        messages = self.errors or self.warnings or ["no message"]
        return " ".join(messages[0].split())


class Library:
    """TensorRT, imported at the first use; `log` holds its messages."""

    def __init__(self) -> None:
        self.log = Log()
        self._logger: Any = None
        self._runtime: Any = None

    @functools.cached_property
    def api(self) -> Any:
        """Return the library's Python module. Raises InputError where this Python cannot load it."""
        try:
            return importlib.import_module("tensorrt")
        except ModuleNotFoundError as error:
            if error.name != "tensorrt":
                raise
            why_not = "is not installed for this Python"
        except (ImportError, OSError) as error:  # its libraries, or those that they link, are not found
            why_not = f"cannot be loaded: {' '.join(str(error).split())}"
        raise InputError(
            f"backend tensorrt: the Python package tensorrt {why_not}; pip install tensorrt-cu12, or see "
            "docs/tensorrt.md"
        )

    def require(self) -> None:
        """Raise InputError where there is no supported version that this Python can load."""
        if not (10, 3) <= self.version() < (12, 0):
            raise InputError(f"backend tensorrt: expected TensorRT 10.3 to 11.x, found {self.version_text()}")

    def version_text(self) -> str:
        return self.api.__version__

    @property
    def title(self) -> str:
        return f"TensorRT {self.version_text()}"

    def version(self) -> Version:
        major, minor = self.version_text().split(".")[:2]
        return int(major), int(minor)

    def logger(self) -> Any:
        """Return the library's logger, which fills `log`."""
        self.require()
        if self._logger is None:
            trt: Any = self.api
            log = self.log

            class Collect(trt.ILogger):
                def __init__(self) -> None:
                    trt.ILogger.__init__(self)

                def log(self, severity: Any, message: str) -> None:
                    if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                        log.errors.append(message)
                    elif severity == trt.ILogger.WARNING:
                        log.warnings.append(message)

            self._logger = Collect()
        return self._logger

    def _dtypes(self) -> dict[Any, str]:
        return {
            self.api.DataType.FLOAT: "float32", self.api.DataType.HALF: "float16", self.api.DataType.BF16: "bfloat16",
            self.api.DataType.INT64: "int64", self.api.DataType.INT32: "int32", self.api.DataType.INT8: "int8",
            self.api.DataType.INT4: "int4", self.api.DataType.UINT8: "uint8", self.api.DataType.BOOL: "bool",
        }  # fmt: skip

    # --- build

    def create_builder(self) -> trt.Builder:
        """Return a builder.

        Raises InputError without a GPU, for which the driver is asked first: TensorRT 10.6 ends the process there.
        """
        self.log.clear()
        needed = f"backend tensorrt: {self.title} cannot start here: expected an NVIDIA GPU and its driver, found"
        if compute_capability() is None:
            raise InputError(f"{needed} none")
        try:
            return self.api.Builder(self.logger())
        except TypeError:
            raise InputError(f"{needed}: {self.log.first_error()}") from None

    def create_network(self, builder: trt.Builder) -> trt.INetworkDefinition:
        return builder.create_network(1 << int(self.api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))

    def parse(self, network: trt.INetworkDefinition, model: bytes, where: str) -> trt.OnnxParser:
        """Fill `network` from an ONNX model; return the parser, which must live as long. Raises CheckError."""
        self.log.clear()
        parser: trt.OnnxParser = self.api.OnnxParser(network, self.logger())
        if not parser.parse(model):
            message = self.log.first_error()
            if parser.num_errors:
                message = " ".join(str(parser.get_error(0)).split())
            raise CheckError(f"{where}: {self.title} cannot read this graph: {message}")
        return parser

    def create_config(self, builder: trt.Builder, workspace_bytes: int, level: int) -> trt.IBuilderConfig:
        """Return a configuration: layers in detail, no TF32."""
        config: trt.IBuilderConfig = builder.create_builder_config()
        config.set_memory_pool_limit(self.api.MemoryPoolType.WORKSPACE, workspace_bytes)
        config.builder_optimization_level = level
        config.profiling_verbosity = self.api.ProfilingVerbosity.DETAILED
        config.clear_flag(self.api.BuilderFlag.TF32)
        return config

    def add_profile(
        self,
        builder: trt.Builder,
        config: trt.IBuilderConfig,
        shapes: Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]],
    ) -> None:
        """Add an optimization profile, {input: (min, opt, max)}. Raises CheckError if refused."""
        self.log.clear()
        profile: trt.IOptimizationProfile = builder.create_optimization_profile()
        for name, (low, best, high) in shapes.items():
            profile.set_shape(name, tuple(low), tuple(best), tuple(high))
        if config.add_optimization_profile(profile) < 0:
            raise CheckError(f"{self.title} refuses the optimization profile {dict(shapes)}: {self.log.first_error()}")

    def create_timing_cache(self, config: trt.IBuilderConfig, data: bytes) -> trt.ITimingCache | None:
        """Return a timing cache, empty or of serialized bytes, for several configurations; None if refused."""
        self.log.clear()
        cache: trt.ITimingCache | None = config.create_timing_cache(data)
        if self.log.first(REFUSED_CACHE):
            return None
        return cache

    def has_editable_cache(self) -> bool:
        """Return whether entries of timing caches can be read: which tactic was chosen for what."""
        return self.version() >= EDITABLE_CACHE

    def use_timing_cache(self, config: trt.IBuilderConfig, cache: trt.ITimingCache, replay: bool) -> bool:
        """Build with this cache, False where it is refused; replay: an entry that it lacks is an error."""
        if self.has_editable_cache():
            config.set_flag(self.api.BuilderFlag.EDITABLE_TIMING_CACHE)
        if replay:
            config.set_flag(self.api.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
        return config.set_timing_cache(cache, False)

    def serialize_timing_cache(self, config: trt.IBuilderConfig) -> bytes:
        """Return the timing cache of a configuration, with what the build added."""
        cache: trt.ITimingCache = config.get_timing_cache()
        return bytes(cache.serialize())

    def cached_tactics(self, config: trt.IBuilderConfig) -> dict[str, str]:
        """Return {key: hash of the tactic} of the timing cache; {} where the version cannot read entries."""
        if not self.has_editable_cache():
            return {}
        cache: trt.ITimingCache = config.get_timing_cache()
        tactics = {}
        for key in cache.queryKeys():
            value: trt.TimingCacheValue = cache.query(key)
            tactics[str(key)] = f"0x{value.tacticHash:016x}"
        return dict(sorted(tactics.items()))

    def build_plan(
        self, builder: trt.Builder, network: trt.INetworkDefinition, config: trt.IBuilderConfig, where: str
    ) -> bytes:
        """Return the serialized engine. Raises GraphRefusedError, or CheckError for a timing cache that is refused."""
        self.log.clear()
        memory: trt.IHostMemory | None = builder.build_serialized_network(network, config)
        if memory is None:
            raise GraphRefusedError(f"{where}: {self.title} cannot build this graph: {self.log.first_error()}")
        if message := self.log.first(REFUSED_CACHE):
            raise CheckError(
                f"{where}: {self.title} refuses the timing cache: {message}; delete timing.cache and build again"
            )
        return bytes(memory)

    # --- run

    def deserialize(self, data: bytes, where: str) -> trt.ICudaEngine:
        """Return the engine of an engine plan's bytes. Raises CheckError with TensorRT's first error."""
        self.log.clear()
        if self._runtime is None:  # it must outlive its engines
            self._runtime = self.api.Runtime(self.logger())
        runtime: trt.Runtime = self._runtime
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise CheckError(
                f"{where}: {self.title} cannot load this engine: {self.log.first_error()}; "
                f"build the engines again on this machine"
            )
        return engine

    def tensors(self, engine: trt.ICudaEngine) -> list[Tensor]:
        dtypes = self._dtypes()
        tensors: list[Tensor] = []
        for number in range(engine.num_io_tensors):
            name = engine.get_tensor_name(number)
            is_input = engine.get_tensor_mode(name) == self.api.TensorIOMode.INPUT
            bounds: list[tuple[tuple[int, ...], ...]] = []
            if is_input:
                for profile in range(engine.num_optimization_profiles):
                    bounds.append(tuple(map(tuple, engine.get_tensor_profile_shape(name, profile))))
            dtype = named_dtype(dtypes[engine.get_tensor_dtype(name)])
            shape = tuple(engine.get_tensor_shape(name))
            tensors.append(Tensor(name, is_input, dtype, shape, tuple(bounds)))
        return tensors

    def create_context(self, engine: trt.ICudaEngine, where: str) -> trt.IExecutionContext:
        """Return a context without scratch memory: `set_device_memory` before it runs. Raises CheckError."""
        self.log.clear()
        context = engine.create_execution_context(self.api.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise CheckError(f"{where}: {self.title} cannot make an execution context: {self.log.first_error()}")
        return context

    def device_memory_size(self, engine: trt.ICudaEngine) -> int:
        """Return the bytes of scratch memory that a context needs, over all profiles."""
        return engine.device_memory_size_v2

    def set_device_memory(self, context: trt.IExecutionContext, address: int, size: int) -> None:
        """Let a context use `size` bytes at a device address, aligned to 256."""
        context.set_device_memory(address, size)

    def set_profile(self, context: trt.IExecutionContext, number: int, stream: int) -> None:
        self.log.clear()
        if context.active_optimization_profile != number and not context.set_optimization_profile_async(number, stream):
            raise CheckError(f"{self.title} refuses optimization profile {number}: {self.log.first_error()}")

    def set_input_shape(self, context: trt.IExecutionContext, name: str, shape: Sequence[int]) -> None:
        self.log.clear()
        if not context.set_input_shape(name, tuple(shape)):
            raise CheckError(f"input {name}: {self.title} refuses the shape {list(shape)}: {self.log.first_error()}")

    def shape(self, context: trt.IExecutionContext, name: str) -> tuple[int, ...]:
        """Return the shape of an input or output, once the shapes of all inputs are set."""
        return tuple(context.get_tensor_shape(name))

    def set_tensor_address(self, context: trt.IExecutionContext, name: str, address: int) -> None:
        self.log.clear()
        if not context.set_tensor_address(name, address):
            raise CheckError(f"tensor {name}: {self.title} refuses the address: {self.log.first_error()}")

    def enqueue(self, context: trt.IExecutionContext, stream: int) -> None:
        """Put one execution on a CUDA stream; all addresses and shapes must be set."""
        self.log.clear()
        if not context.execute_async_v3(stream):
            raise CheckError(f"{self.title} cannot run: {self.log.first_error()}")

    def layer_information(self, engine: trt.ICudaEngine) -> str:
        """Return the inspector's JSON of all layers; may hold raw control characters."""
        inspector: trt.EngineInspector = engine.create_engine_inspector()
        return inspector.get_engine_information(self.api.LayerInformationFormat.JSON)


TENSORRT = Library()
