"""TensorRT 8.6, 10.x and 11.x behind one set of functions. The only module that imports `tensorrt`.

What a version lacks stands in FEATURES, and is asked for with `has`. All else is used on every version: tests hold each
attribute that is named here, and the class that it is an attribute of, against listings of the versions' Python API.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.errors import CheckError, InputError

try:
    import tensorrt as trt
except ModuleNotFoundError as error:
    if error.name != "tensorrt":
        raise
    trt, _why_not = None, "is not installed for this Python"
except (ImportError, OSError) as error:  # its libraries, or those that they link, are not found
    trt, _why_not = None, f"cannot be loaded: {' '.join(str(error).split())}"

Version = tuple[int, int]

# "The timing cache will not be used!", "Timing cache ... mismatch": only said, as an error or a warning, while the
# build goes on.
_REFUSED_CACHE = re.compile(
    r"timing cache.*(not be "
    r"used|mismatch|corrupt|invalid|different)|(mismatch|corrupt|invalid).*timing cache",
    re.IGNORECASE | re.DOTALL,
)
# of TensorRT's compiler of fused regions, which has a part of the timing cache to itself
_OF_REGIONS = re.compile(r"myelinCache")
# "No implementation of layer ... obeys the requested constraints ...": a warning where constraints are only preferred.
_IGNORED_PRECISION = re.compile(
    r"obeys? the requested constraints|precision.*(ignored|not "
    r"obeyed)",
    re.IGNORECASE | re.DOTALL,
)

# not documented; NVIDIA's own tools for engines pass flags by this variable
_FLAGS, _FP16_SUMS = "__LUNOWUD", "-cask:fp16_acc"


class GraphRefusedError(CheckError):
    """TensorRT does not build a graph in the form that it is given, or not in its precision."""


@dataclass(frozen=True)
class Feature:
    """Something that not every version has: from `since`, to below `until` where it was taken away. `needs`: its
    attributes."""

    since: Version
    until: Version | None
    needs: tuple[str, ...]


FEATURES: dict[str, Feature] = {
    # Explicit batch is a flag up to 8.x; later it is the only kind of network.
    "explicit_batch_flag": Feature((8, 6), (10, 0), ("NetworkDefinitionCreationFlag.EXPLICIT_BATCH",)),
    # Precision from the graph's types alone. Without it: a builder flag, and a constraint on each layer.
    "strong_types": Feature((10, 0), None, ("NetworkDefinitionCreationFlag.STRONGLY_TYPED",)),
    "precision_constraints": Feature(
        (8, 6),
        (10, 0),
        ("BuilderFlag.FP16", "BuilderFlag.OBEY_PRECISION_CONSTRAINTS", "ILayer.precision", "ILayer.set_output_type"),
    ),
    # Takes kernels that add up fp16 products in fp16, unless its compiler is told not to; it has no setting for that,
    # only its flags.
    "fp16_sums": Feature((8, 6), (10, 0), ()),
    # What is in fused regions stands in the plan alone, as text (regions.py); the part of a timing cache that it is
    # chosen by may be refused.
    "hidden_regions": Feature((8, 6), (10, 0), ()),
    # Takes a whole graph as one fused region where a Gather of fp16 numbers follows; else only after trying many ways
    # to divide it (one_region.py).
    "one_region": Feature((8, 6), (10, 0), ()),
    # Several contexts of one profile: asked for when the engine is built; later it is always so.
    "profile_sharing_flag": Feature(
        (8, 6), (10, 0), ("IBuilderConfig.set_preview_feature", "PreviewFeature.PROFILE_SHARING_0806")
    ),
    "bf16": Feature((10, 0), None, ("DataType.BF16",)),
    "int64": Feature((10, 0), None, ("DataType.INT64",)),  # earlier, int64 inputs become int32
    "cache_miss_error": Feature((10, 0), None, ("BuilderFlag.ERROR_ON_TIMING_CACHE_MISS",)),
    # Timing caches whose entries can be read: which tactic was chosen for what.
    "editable_cache": Feature(
        (10, 8),
        None,
        (
            "BuilderFlag.EDITABLE_TIMING_CACHE",
            "ITimingCache.queryKeys",
            "ITimingCache.query",
            "TimingCacheValue.tacticHash",
        ),
    ),
    "opset_18": Feature((10, 0), None, ()),  # 8.6 parses it without a word, and reduces over other axes
    # Contexts whose scratch memory the caller owns.
    "context_without_memory": Feature((8, 6), (10, 0), ("ICudaEngine.create_execution_context_without_device_memory",)),
    "context_strategy": Feature((10, 0), None, ("ExecutionContextAllocationStrategy.USER_MANAGED",)),
    "memory_size": Feature((8, 6), (10, 1), ("ICudaEngine.device_memory_size",)),
    "memory_size_v2": Feature(
        (10, 1), None, ("ICudaEngine.device_memory_size_v2", "IExecutionContext.set_device_memory")
    ),
}


def require() -> None:
    """Raises InputError where there is no TensorRT that this Python can load, or one that this code is not for."""
    if trt is None:
        raise InputError(
            f"backend tensorrt: the Python package tensorrt {_why_not}; install what is "
            f"missing, or name another interpreter in backends.tensorrt.python"
        )
    if not (8, 6) <= version() < (12, 0) or version()[0] == 9:
        raise InputError(f"backend tensorrt: expected TensorRT 8.6, 10.x or 11.x, found {trt.__version__}")


def version_text() -> str:
    require()
    return trt.__version__


def version() -> Version:
    major, minor = trt.__version__.split(".")[:2]
    return int(major), int(minor)


def available(feature: Feature, of: Version) -> bool:
    return feature.since <= of and (feature.until is None or of < feature.until)


def has(name: str) -> bool:
    """Whether this version has a feature of the table."""
    return available(FEATURES[name], version())


class Log:
    """What TensorRT says: errors and warnings since `clear`, first one first. One for the process, as TensorRT has
    it."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def clear(self) -> None:
        self.errors.clear()
        self.warnings.clear()

    def first(self, pattern: re.Pattern) -> str | None:
        """The first error or warning in which the pattern is found, on one line."""
        return next((" ".join(text.split()) for text in (*self.errors, *self.warnings) if pattern.search(text)), None)

    def first_error(self) -> str:
        """The first error, else the first warning, on one line."""
        said = self.errors or self.warnings or ["no message"]
        return " ".join(said[0].split())


LOG = Log()
_logger: Any = None
_runtime: Any = None


def logger() -> Any:
    """TensorRT's logger, which fills LOG."""
    global _logger
    require()
    if _logger is None:

        class Collect(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                    LOG.errors.append(message)
                elif severity == trt.ILogger.WARNING:
                    LOG.warnings.append(message)

        _logger = Collect()
    return _logger


def _dtypes() -> dict[Any, str]:
    types = {
        trt.DataType.FLOAT: "float32", trt.DataType.HALF: "float16", trt.DataType.INT32: "int32",
        trt.DataType.INT8: "int8", trt.DataType.UINT8: "uint8", trt.DataType.BOOL: "bool",
    }  # fmt: skip
    if has("bf16"):
        types[trt.DataType.BF16] = "bfloat16"
    if has("int64"):
        types[trt.DataType.INT64] = "int64"
    return types


# --- build


def create_builder() -> trt.Builder:
    """Raises InputError where TensorRT cannot start, which is without a GPU."""
    LOG.clear()
    if flags := compiler_flags():
        os.environ[_FLAGS] = flags
    try:
        return trt.Builder(logger())
    except TypeError:
        raise InputError(
            f"backend tensorrt: TensorRT {trt.__version__} cannot start here: "
            f"{LOG.first_error()}; it needs an NVIDIA GPU and its driver"
        ) from None


def compiler_flags() -> str:
    """What the compiler of fused regions is told, by the variable that it reads its flags from: what the user set
    there, and where the version needs it to add up fp16 products in fp32, unless the user said something else of
    that."""
    flags = os.environ.get(_FLAGS, "").split()
    if has("fp16_sums") and not any(flag.startswith(f"{_FP16_SUMS}=") for flag in flags):
        flags = [*flags, f"{_FP16_SUMS}=off"]
    return " ".join(flags)


def users_flags() -> str | None:
    """Those flags where they are not what they are when the user sets none: they decide what an engine computes. None
    where they are."""
    flags = compiler_flags()
    return None if flags == (f"{_FP16_SUMS}=off" if has("fp16_sums") else "") else flags


def create_network(builder: trt.Builder) -> trt.INetworkDefinition:
    flags = 0
    if has("explicit_batch_flag"):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    if has("strong_types"):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return builder.create_network(flags)


def parse(network: trt.INetworkDefinition, model: bytes, where: str) -> trt.OnnxParser:
    """Fill `network` from a serialized ONNX model; gives the parser, which must live as long as the network.

    Raises CheckError with what the parser says.
    """
    LOG.clear()
    parser: trt.OnnxParser = trt.OnnxParser(network, logger())
    if not parser.parse(model):
        said = " ".join(str(parser.get_error(0)).split()) if parser.num_errors else LOG.first_error()
        raise CheckError(f"{where}: TensorRT {trt.__version__} cannot read this graph: {said}")
    return parser


def tactic_source_names() -> list[str]:
    return sorted(name.lower() for name in trt.TacticSource.__members__)


def create_config(
    builder: trt.Builder, workspace_bytes: int, level: int, tactic_sources: Sequence[str] | None
) -> trt.IBuilderConfig:
    """A configuration with detailed layer information and without TF32: fp32 graphs are computed in fp32."""
    config: trt.IBuilderConfig = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    config.builder_optimization_level = level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)
    if has("profile_sharing_flag"):
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    if tactic_sources is not None:
        known = trt.TacticSource.__members__
        unknown = sorted(set(tactic_sources) - {name.lower() for name in known})
        if unknown:
            raise InputError(
                f"tactic_sources: expected some of {', '.join(tactic_source_names())} (TensorRT "
                f"{trt.__version__}), found {', '.join(unknown)}"
            )
        config.set_tactic_sources(sum(1 << int(known[name.upper()]) for name in set(tactic_sources)))
    return config


def constrain_precision(config: trt.IBuilderConfig, network: trt.INetworkDefinition, types: Mapping[str, str]) -> None:
    """Where networks are weakly typed: hold every layer to the type that the graph gives its result.

    types: the ONNX graph's {tensor: dtype}. Layers that the parser adds take the type of what they read.
    """
    if not has("precision_constraints"):
        return
    if "float16" not in types.values():
        return  # nothing but fp32 is allowed without the flag
    config.set_flag(trt.BuilderFlag.FP16)
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    kinds = {"float32": trt.DataType.FLOAT, "float16": trt.DataType.HALF}
    # None: integers and truth values, which have no precision
    known = {name: kinds.get(dtype) for name, dtype in types.items()}
    for number in range(network.num_layers):
        layer: trt.ILayer = network.get_layer(number)
        first = None
        for i in range(layer.num_inputs):
            read: trt.ITensor | None = layer.get_input(i)
            if first is None and read is not None:
                first = known.get(read.name)
        held = None
        for i in range(layer.num_outputs):
            made: trt.ITensor = layer.get_output(i)
            if made.name not in known:
                floating = made.dtype in (trt.DataType.FLOAT, trt.DataType.HALF)
                known[made.name] = (first or made.dtype) if floating else None
            if known[made.name] and not made.is_shape_tensor:
                held = known[made.name]
                layer.set_output_type(i, held)
        if held and layer.type not in (trt.LayerType.CONSTANT, trt.LayerType.CAST):
            layer.precision = held


def add_profile(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    shapes: Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]],
) -> None:
    """Add an optimization profile: {input: (min, opt, max)}."""
    LOG.clear()
    profile: trt.IOptimizationProfile = builder.create_optimization_profile()
    for name, (low, best, high) in shapes.items():
        profile.set_shape(name, tuple(low), tuple(best), tuple(high))
    if config.add_optimization_profile(profile) < 0:
        raise CheckError(
            f"TensorRT {trt.__version__} refuses the optimization profile {dict(shapes)}: {LOG.first_error()}"
        )


def create_timing_cache(config: trt.IBuilderConfig, data: bytes) -> tuple[trt.ITimingCache | None, bool]:
    """An empty cache, or one that was serialized; it may serve several configurations. None where TensorRT refuses the
    bytes.

    And whether it is whole: 8.6.0 takes the times of layers, and refuses the part of its own caches that fused regions
    are chosen by.
    """
    LOG.clear()
    cache: trt.ITimingCache | None = config.create_timing_cache(data)
    if not LOG.first(_REFUSED_CACHE):
        return cache, True
    return (cache if has("hidden_regions") and LOG.first(_OF_REGIONS) else None), False


def use_timing_cache(config: trt.IBuilderConfig, cache: trt.ITimingCache, replay: bool) -> bool:
    """Build with this cache; False where TensorRT refuses it. `replay`: what it does not hold is an error, where the
    version can say so."""
    if has("editable_cache"):
        config.set_flag(trt.BuilderFlag.EDITABLE_TIMING_CACHE)
    if replay and has("cache_miss_error"):
        config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
    return config.set_timing_cache(cache, False)


def serialize_timing_cache(config: trt.IBuilderConfig) -> bytes:
    """The timing cache that a configuration was built with, and what the build added."""
    cache: trt.ITimingCache = config.get_timing_cache()
    return bytes(cache.serialize())


def cached_tactics(config: trt.IBuilderConfig) -> dict[str, str]:
    """{key: hash of the tactic} of all entries of that cache, where the version lets them be read; else {}."""
    if not has("editable_cache"):
        return {}
    cache: trt.ITimingCache = config.get_timing_cache()
    found = {}
    for key in cache.queryKeys():
        value: trt.TimingCacheValue = cache.query(key)
        found[str(key)] = f"0x{value.tacticHash:016x}"
    return dict(sorted(found.items()))


def build_plan(builder: trt.Builder, network: trt.INetworkDefinition, config: trt.IBuilderConfig, where: str) -> bytes:
    """The serialized engine. Raises GraphRefusedError with TensorRT's first error, CheckError for a timing cache that
    it refuses."""
    LOG.clear()
    memory: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if memory is None:
        raise GraphRefusedError(f"{where}: TensorRT {trt.__version__} cannot build this graph: {LOG.first_error()}")
    if said := LOG.first(_REFUSED_CACHE):
        raise CheckError(
            f"{where}: TensorRT {trt.__version__} refuses the timing cache: {said}; delete timing.cache and build again"
        )
    if said := LOG.first(_IGNORED_PRECISION):
        raise GraphRefusedError(
            f"{where}: TensorRT {trt.__version__} does not compute in the graph's precision: {said}"
        )
    return bytes(memory)


# --- run


def deserialize(data: bytes, where: str) -> trt.ICudaEngine:
    """An engine of a plan's bytes. Raises CheckError with TensorRT's first error."""
    global _runtime
    LOG.clear()
    if _runtime is None:  # it must outlive its engines
        _runtime = trt.Runtime(logger())
    runtime: trt.Runtime = _runtime
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise CheckError(
            f"{where}: TensorRT {trt.__version__} cannot load this engine: {LOG.first_error()}; "
            f"build the engines again on this machine"
        )
    return engine


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine. shape: -1 where it is dynamic. profiles: (min, opt, max) of each, for inputs."""

    name: str
    is_input: bool
    dtype: np.dtype
    shape: tuple[int, ...]
    profiles: tuple[tuple[tuple[int, ...], ...], ...]


def tensors(engine: trt.ICudaEngine) -> list[Tensor]:
    """All inputs and outputs of an engine."""
    dtypes = _dtypes()
    found: list[Tensor] = []
    for number in range(engine.num_io_tensors):
        name = engine.get_tensor_name(number)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        profiles = range(engine.num_optimization_profiles) if is_input else ()
        bounds = tuple(
            tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(name, profile)) for profile in profiles
        )
        found.append(
            Tensor(
                name,
                is_input,
                _dtype(dtypes[engine.get_tensor_dtype(name)]),
                tuple(engine.get_tensor_shape(name)),
                bounds,
            )
        )
    return found


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes  # NumPy has none

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def num_profiles(engine: trt.ICudaEngine) -> int:
    return engine.num_optimization_profiles


def create_context(engine: trt.ICudaEngine, where: str) -> trt.IExecutionContext:
    """A context without scratch memory of its own: give it some with `set_device_memory` before it runs."""
    LOG.clear()
    if has("context_strategy"):
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    else:
        context = engine.create_execution_context_without_device_memory()
    if context is None:
        raise CheckError(f"{where}: TensorRT {trt.__version__} cannot make an execution context: {LOG.first_error()}")
    return context


def device_memory_size(engine: trt.ICudaEngine) -> int:
    """Bytes of scratch memory that a context needs at most, over all profiles."""
    return engine.device_memory_size_v2 if has("memory_size_v2") else engine.device_memory_size


def set_device_memory(context: trt.IExecutionContext, address: int, size: int) -> None:
    """Let a context use `size` bytes at a device address, aligned to 256."""
    if has("memory_size_v2"):
        context.set_device_memory(address, size)
    else:
        context.device_memory = address


def set_profile(context: trt.IExecutionContext, number: int, stream: int) -> None:
    LOG.clear()
    if context.active_optimization_profile != number and not context.set_optimization_profile_async(number, stream):
        raise CheckError(f"TensorRT {trt.__version__} refuses optimization profile {number}: {LOG.first_error()}")


def set_input_shape(context: trt.IExecutionContext, name: str, shape: Sequence[int]) -> None:
    LOG.clear()
    if not context.set_input_shape(name, tuple(shape)):
        raise CheckError(
            f"input {name}: TensorRT {trt.__version__} refuses the shape {list(shape)}: {LOG.first_error()}"
        )


def set_tensor_address(context: trt.IExecutionContext, name: str, address: int) -> None:
    LOG.clear()
    if not context.set_tensor_address(name, address):
        raise CheckError(f"tensor {name}: TensorRT {trt.__version__} refuses the address: {LOG.first_error()}")


def enqueue(context: trt.IExecutionContext, stream: int) -> None:
    """Put one execution on a CUDA stream; all addresses and shapes must be set."""
    LOG.clear()
    if not context.execute_async_v3(stream):
        raise CheckError(f"TensorRT {trt.__version__} cannot run: {LOG.first_error()}")


def layer_information(engine: trt.ICudaEngine) -> str:
    """The inspector's JSON of all layers; may hold raw control characters."""
    inspector: trt.EngineInspector = engine.create_engine_inspector()
    return inspector.get_engine_information(trt.LayerInformationFormat.JSON)
