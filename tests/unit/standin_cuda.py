"""A stand-in for CUDA, TensorRT and cuDNN on a machine without a GPU, on which all of our own code runs as it is.

It is a strict device. Its memory is no host memory: addresses lie elsewhere, each access is held against the
allocations, new and freed memory is full of NaN, and no address is given out twice. Streams do nothing until the host
waits for just them, so that whatever relies on an order which nothing holds is wrong. A captured graph replays the
addresses that it was captured with, and asks that its contexts still live and have the shapes of then. Page-locked host
memory is read when a copy runs, other host memory when it is asked for. Plans are the ONNX graphs that the builder
asked for, run by ONNX Runtime; our kernels and cuDNN's attention over pages are NumPy, and what cuDNN spoils is NaN.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import json
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import onnx

OURS = tuple(
    f"lockstep.backends.tensorrt.{name}"
    for name in (
        "cuda",
        "kernels",
        "fused_form",
        "paged_decode_attention",
        "rope_kernel",
        "program",
        "attention",
        "fused_attention",
        "executor",
    )
)
KINDS = enum.Enum("DataType", "FLOAT HALF INT32 INT8 UINT8 BOOL BF16 INT64")
MODES = enum.Enum("TensorIOMode", "INPUT OUTPUT")
ERRORS = enum.IntEnum("cudaError_t", {"cudaSuccess": 0, "cudaErrorMemoryAllocation": 2})
COPIES = enum.IntEnum(
    "cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2, "cudaMemcpyDeviceToDevice": 3}
)
NUMBERS = {0: np.dtype("f4"), 1: np.dtype("f2"), 2: np.dtype(ml_dtypes.bfloat16)}
POISON = 0xFF  # NaN in all floating types, -1 in integers


class Fault(Exception):
    """What a GPU would not survive, or would not say."""


class Gpu:
    """The device's memory and streams. total: bytes of memory; faults: what was wrong where nothing could be raised."""

    def __init__(self) -> None:
        self.total, self.used, self.faults = 1 << 34, 0, []
        self.launches = 0  # of graphs
        self.plain = 0  # of kernels and engines outside of graphs
        self.lock = threading.RLock()
        self._next, self._starts, self._blocks = 1 << 44, [], {}
        self._host: dict[int, tuple[np.ndarray, ctypes.Array]] = {}
        self._queues: dict[int, list[Callable[[], None]]] = {0: []}
        self._captures: dict[int, list[Callable[[], None]]] = {}
        self._events: dict[int, list] = {}

    # --- memory

    @property
    def blocks(self) -> int:
        """Allocations on the device that live."""
        return sum(block is not None for block in self._blocks.values())

    def malloc(self, nbytes: int):
        with self.lock:
            if self.used + nbytes > self.total:
                return ERRORS.cudaErrorMemoryAllocation, 0
            address, self._next = self._next, self._next + nbytes // 4096 * 4096 + 8192
            self._starts.append(address)
            self._blocks[address] = np.full(nbytes, POISON, np.uint8)
            self.used += nbytes
            return ERRORS.cudaSuccess, address

    def free(self, address: int):
        with self.lock:
            if address:
                if self._blocks.get(address) is None:
                    self.faults.append(f"freed: {address:#x}, which is none that lives")
                else:
                    self.used -= self._blocks[address].size
                    self._blocks[address] = None
            return (ERRORS.cudaSuccess,)

    def bytes(self, address: int, nbytes: int) -> np.ndarray:
        """Device memory, [nbytes] uint8, in place."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0:
            raise Fault(f"{address:#x} is no device memory")
        start = self._starts[number]
        block = self._blocks[start]
        if block is None:
            raise Fault(f"{address:#x} is used after it was freed")
        if address - start + nbytes > block.size:
            raise Fault(
                f"{nbytes} bytes at {address:#x}: {address - start + nbytes - block.size} behind the "
                f"end of {block.size}"
            )
        return block[address - start : address - start + nbytes]

    def array(self, address: int, shape, dtype) -> np.ndarray:
        """Device memory as numbers, in place."""
        return self.bytes(address, int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def malloc_host(self, nbytes: int):
        with self.lock:
            block = ctypes.create_string_buffer(nbytes)
            self._host[ctypes.addressof(block)] = np.frombuffer(block, np.uint8), block
            return ERRORS.cudaSuccess, ctypes.addressof(block)

    def free_host(self, address: int):
        with self.lock:
            self._host.pop(address)
            return (ERRORS.cudaSuccess,)

    def host(self, address: int, nbytes: int) -> np.ndarray:
        if address >= 1 << 44 and any(start <= address < start + (1 << 20) for start in self._starts):
            raise Fault(f"{address:#x} is no host memory")
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return any(
            start <= address and address + nbytes <= start + block.size for start, (block, _) in self._host.items()
        )

    # --- streams

    def put(self, stream: int, work: Callable[[], None]) -> None:
        with self.lock:
            (self._captures[stream] if stream in self._captures else self._queues[stream]).append(work)

    def capturing(self, stream: int) -> bool:
        return stream in self._captures

    def create_stream(self, flags: int):
        if flags != 1:
            raise Fault("only non-blocking streams are stood in for")
        with self.lock:
            handle = 100 + len(self._queues)
            self._queues[handle] = []
            return ERRORS.cudaSuccess, handle

    def synchronize(self, stream: int):
        if stream in self._captures:
            raise Fault("a stream that captures cannot be waited for")
        return self._work(stream, lambda: False)

    def _work(self, stream: int, done: Callable[[], bool]):
        with self.lock:
            queue = self._queues[stream]
            while queue and not done():
                queue.pop(0)()
        return (ERRORS.cudaSuccess,)

    def memset(self, address: int, value: int, nbytes: int):
        def run() -> None:
            self.bytes(address, nbytes)[:] = value

        self.put(0, run)  # asynchronous to the host, and to all non-blocking streams
        return (ERRORS.cudaSuccess,)

    def memset_rows(self, address: int, pitch: int, value: int, width: int, rows: int, stream: int):
        def run() -> None:
            for row in range(rows):
                self.bytes(address + row * pitch, width)[:] = value

        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    def copy(self, to: int, source: int, nbytes: int, kind: COPIES, stream: int):
        if kind == COPIES.cudaMemcpyHostToDevice:
            given = self.host(source, nbytes)
            if not self.is_pinned(source, nbytes):
                if self.capturing(stream):
                    raise Fault("a graph copies from host memory that may move")
                given = given.copy()

            def run() -> None:
                self.bytes(to, nbytes)[:] = given
        elif kind == COPIES.cudaMemcpyDeviceToHost:

            def run() -> None:
                self.host(to, nbytes)[:] = self.bytes(source, nbytes)
        else:
            raise Fault(f"{kind} is not stood in for")
        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    def copy_rows(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, rows: int, kind: COPIES, stream: int
    ):
        if kind != COPIES.cudaMemcpyDeviceToDevice or width > min(to_pitch, pitch):
            raise Fault(f"rows of {width} bytes, {pitch} and {to_pitch} apart, {kind}")

        def run() -> None:
            for row in range(rows):
                self.bytes(to + row * to_pitch, width)[:] = self.bytes(source + row * pitch, width)

        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    # --- graphs, events

    def begin_capture(self, stream: int, mode: int):
        self._captures[stream] = []
        return (ERRORS.cudaSuccess,)

    def end_capture(self, stream: int):
        return ERRORS.cudaSuccess, self._captures.pop(stream)

    def launch_graph(self, graph: list, stream: int):
        self.launches += 1
        for work in graph:
            self.put(stream, work)
        return (ERRORS.cudaSuccess,)

    def create_event(self):
        event: list = [0, 0.0, None]  # not recorded yet: nothing to wait for
        self._events[id(event)] = event
        return ERRORS.cudaSuccess, event

    def record(self, event: list, stream: int):
        event[:] = mark = [stream, None, object()]

        def run() -> None:
            if event[2] is mark[2]:  # else it was recorded again meanwhile
                event[1] = time.perf_counter()

        self.put(stream, run)
        return (ERRORS.cudaSuccess,)

    def wait(self, event: list):
        """What is behind it in its stream stays to be done."""
        return self._work(event[0], lambda: event[1] is not None)


# --- cuda-python


def runtime(gpu: Gpu) -> ModuleType:
    module, done = ModuleType("cuda.bindings.runtime"), (ERRORS.cudaSuccess,)
    attributes = enum.IntEnum(
        "cudaDeviceAttr",
        "cudaDevAttrComputeCapabilityMajor cudaDevAttrComputeCapabilityMinor cudaDevAttrMultiProcessorCount",
    )
    vars(module).update(
        cudaError_t=ERRORS,
        cudaMemcpyKind=COPIES,
        cudaStreamNonBlocking=1,
        cudaDeviceAttr=attributes,
        cudaStreamCaptureMode=SimpleNamespace(cudaStreamCaptureModeRelaxed=2),
        cudaDeviceGetAttribute=lambda which, device: (ERRORS.cudaSuccess, 10 - which),
        cudaMalloc=gpu.malloc,
        cudaFree=gpu.free,
        cudaMallocHost=gpu.malloc_host,
        cudaFreeHost=gpu.free_host,
        cudaMemGetInfo=lambda: (ERRORS.cudaSuccess, gpu.total - gpu.used, gpu.total),
        cudaMemset=gpu.memset,
        cudaMemset2DAsync=gpu.memset_rows,
        cudaMemcpyAsync=gpu.copy,
        cudaMemcpy2DAsync=gpu.copy_rows,
        cudaStreamCreateWithFlags=gpu.create_stream,
        cudaStreamSynchronize=gpu.synchronize,
        cudaStreamDestroy=lambda stream: done,
        cudaStreamBeginCapture=gpu.begin_capture,
        cudaStreamEndCapture=gpu.end_capture,
        cudaGraphInstantiate=lambda graph, flags: (ERRORS.cudaSuccess, list(graph)),
        cudaGraphDestroy=lambda graph: done,
        cudaGraphExecDestroy=lambda graph: done,
        cudaGraphLaunch=gpu.launch_graph,
        cudaEventCreate=gpu.create_event,
        cudaEventRecord=gpu.record,
        cudaEventDestroy=lambda event: done,
        cudaEventSynchronize=gpu.wait,
        cudaEventElapsedTime=lambda first, last: (ERRORS.cudaSuccess, (last[1] - first[1]) * 1e3),
    )
    return module


def nvrtc() -> ModuleType:
    """What it compiles a source to is, by kernel, its parameters [(name, is a pointer)] and the numbers that the source
    is compiled for."""
    module, done = ModuleType("cuda.bindings.nvrtc"), (0,)
    sources: list[bytes] = []
    defined: dict[int, dict[str, int]] = {}

    def create(source: bytes, *rest):
        sources.append(source)
        return 0, len(sources) - 1

    def compile_program(program: int, count: int, flags: list[bytes]):
        pairs = (flag.decode()[2:].split("=") for flag in flags if flag.startswith(b"-D"))
        defined[program] = {name: int(value) for name, value in pairs}
        return done

    def code(program: int) -> bytes:
        source = sources[program].decode().replace("\\\n", " ")
        kernels = dict(
            re.findall(
                r'extern "C" __global__ void '
                r"(?:__launch_bounds__\(\w+\)\s+)?(\w+)\(([^)]*)\)",
                source,
            )
        )
        if template := kernels.pop("NAME", None):
            kernels |= dict.fromkeys(re.findall(r"^WRITE\((\w+)", source, re.MULTILINE), template)
        parameters = {
            name: ([(part.split()[-1].strip("*"), "*" in part) for part in text.split(",")], defined[program])
            for name, text in kernels.items()
        }
        return json.dumps(parameters).encode()

    def fill(program: int, out: bytes):
        ctypes.memmove(out, code(program), len(out))
        return done

    vars(module).update(
        nvrtcCreateProgram=create,
        nvrtcCompileProgram=compile_program,
        nvrtcGetCUBINSize=lambda program: (0, len(code(program))),
        nvrtcGetCUBIN=fill,
        nvrtcVersion=lambda: (0, 12, 9),
    )
    return module


def driver(gpu: Gpu) -> ModuleType:
    module, result = ModuleType("cuda.bindings.driver"), enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0})
    attributes = enum.IntEnum(
        "CUdevice_attribute",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    )

    def launch(function, x, y, z, threads, *rest):
        name, parameters, defined = function
        *_, stream, (values, types), extra = rest
        if len(values) != len(parameters) or any(
            (kind is ctypes.c_void_p) != pointer for kind, (_, pointer) in zip(types, parameters, strict=True)
        ):
            raise Fault(f"kernel {name}: expected {parameters}, found {types}")
        named = SimpleNamespace(
            grid=(x, y, z), **defined, **{parameter: value for (parameter, _), value in zip(parameters, values)}
        )
        gpu.plain += not gpu.capturing(stream)
        gpu.put(stream, lambda: KERNELS[name](gpu, x, named))
        return (result.CUDA_SUCCESS,)

    vars(module).update(
        CUresult=result,
        CUdevice_attribute=attributes,
        cuInit=lambda flags: (result.CUDA_SUCCESS,),
        cuDeviceGet=lambda number: (result.CUDA_SUCCESS, 0),
        cuDeviceGetName=lambda size, device: (result.CUDA_SUCCESS, b"stand-in\0"),
        cuDeviceGetAttribute=lambda which, device: (result.CUDA_SUCCESS, 10 - which),
        cuDeviceTotalMem=lambda device: (result.CUDA_SUCCESS, gpu.total),
        cuDriverGetVersion=lambda: (result.CUDA_SUCCESS, 12040),
        cuModuleLoadData=lambda code: (result.CUDA_SUCCESS, json.loads(code)),
        cuLaunchKernel=launch,
        cuModuleGetFunction=lambda module, name: (result.CUDA_SUCCESS, (name.decode(), *module[name.decode()])),
    )
    return module


# --- our kernels


def _integers(gpu: Gpu, address: int, wide: int, count: int) -> np.ndarray:
    return gpu.array(address, (count,), "i8" if wide else "i4")


def write_cache(gpu: Gpu, tokens: int, k: SimpleNamespace, unit: int) -> None:
    rows, positions = gpu.array(k.rows, (tokens,), "i4"), _integers(gpu, k.positions, k.wide, tokens)
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        if row < 0:
            continue
        if not 0 <= position < k.capacity:
            raise Fault(f"write_cache: position {position} in a cache of {k.capacity}")
        for head in range(k.heads):
            place, start = (row * k.heads + head) * k.capacity + position, token * k.heads + head
            for source, to, size in ((k.key, k.keys, k.key_size * unit), (k.value, k.values, k.value_size * unit)):
                gpu.bytes(to + place * size, size)[:] = gpu.bytes(source + start * size, size)


def rotate(gpu: Gpu, tokens: int, k: SimpleNamespace) -> None:
    """What Rotate.launch says."""
    rows, positions = gpu.array(k.rows, (tokens,), "i4"), _integers(gpu, k.positions, k.WIDE, tokens)
    given, kind, partner, heads = (
        NUMBERS[k.GIVEN],
        NUMBERS[k.KIND],
        gpu.array(k.partner, (k.DIM,), "i4"),
        k.KV_HEADS * k.GROUP,
    )
    if (
        any(address % 16 for address in (k.query, k.key, k.value, k.query_out, k.keys, k.values, k.own, k.other))
        or k.DIM % 8
        or k.VALUE_DIM % 8
    ):
        raise Fault("rotate: arrays or heads that are not made of 16 bytes")
    query, key = (
        gpu.array(address, (tokens, count, k.DIM), given).astype(np.float32)
        for address, count in ((k.query, heads), (k.key, k.KV_HEADS))
    )
    value, out = (
        gpu.array(k.value, (tokens, k.KV_HEADS, k.VALUE_DIM), kind),
        gpu.array(k.query_out, (tokens, heads, k.DIM), kind),
    )
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        own, other = (gpu.array(table + position * k.DIM * 4, (k.DIM,), "f4") for table in (k.own, k.other))
        out[token], turned = ((x[token] * own + x[token][:, partner] * other).astype(kind) for x in (query, key))
        if row < 0:
            continue
        if position // k.PAGE >= k.pages_per_row:
            raise Fault(f"rotate: position {position} in a row of {k.pages_per_row} pages")
        page = int(gpu.array(k.pages + (row * k.pages_per_row + position // k.PAGE) * 4, (1,), "i4")[0])
        for new, cache, dim in ((turned, k.keys, k.DIM), (value[token], k.values, k.VALUE_DIM)):
            size = k.KV_HEADS * k.PAGE * dim * kind.itemsize
            gpu.array(cache + page * size, (k.KV_HEADS, k.PAGE, dim), kind)[:, position % k.PAGE] = new


def decode_attention(gpu: Gpu, splits: int, k: SimpleNamespace) -> None:
    """What DecodeAttention.launch says. Its scratch is spoiled, as far as it may be touched; its counters must be 0."""
    _, blocks, requests = k.grid
    rows, positions = gpu.array(k.rows, (requests,), "i4"), _integers(gpu, k.positions, k.WIDE, requests)
    table = gpu.array(k.pages, (requests, k.pages_per_row), "i4")
    given, kind, partner = NUMBERS[k.GIVEN], NUMBERS[k.KIND], gpu.array(k.partner, (k.DIM,), "i4")
    heads = k.KV_HEADS * k.GROUP
    if blocks != k.KV_HEADS * -(-k.GROUP // k.HEADS) or splits not in (2, 4, 8, 16):
        raise Fault(f"decode_attention: a grid of {k.grid}")
    if any(address % 16 for address in (k.value, k.out, k.keys, k.values, k.partials)):
        raise Fault("decode_attention: an array that is not aligned to 16 bytes")
    parts = requests * blocks * splits * k.HEADS
    gpu.array(k.partials, (parts * k.VALUE_DIM,), "f4")[:] = gpu.array(k.stats, (parts * 2,), "f4")[:] = np.nan
    if gpu.array(k.counters, (requests * blocks,), "i4").any():
        raise Fault("decode_attention: counters that are not 0")
    query, key = (
        gpu.array(address, (requests, count, k.DIM), given).astype(np.float32)
        for address, count in ((k.query, heads), (k.key, k.KV_HEADS))
    )
    value, out = (
        gpu.array(k.value, (requests, k.KV_HEADS, k.VALUE_DIM), kind),
        gpu.array(k.out, (requests, heads, k.VALUE_DIM), kind),
    )
    out[:] = 0
    for request, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        if row < 0:
            continue
        if row != request or not 0 <= position < k.pages_per_row * k.PAGE:
            raise Fault(
                f"decode_attention: request {request} of row {row}, position {position} in a row of "
                f"{k.pages_per_row} pages"
            )
        own, other = (gpu.array(table + position * k.DIM * 4, (k.DIM,), "f4") for table in (k.own, k.other))
        turned = [(x[request] * own + x[request][:, partner] * other).astype(kind) for x in (query, key)]
        held = []
        for new, cache, dim in ((turned[1], k.keys, k.DIM), (value[request], k.values, k.VALUE_DIM)):
            size = k.KV_HEADS * k.PAGE * dim * kind.itemsize
            pages = [
                gpu.array(cache + page * size, (k.KV_HEADS, k.PAGE, dim), kind)
                for page in table[request, : position // k.PAGE + 1].tolist()
            ]
            pages[-1][:, position % k.PAGE] = new
            # with a window of 0: all
            held.append(np.concatenate(pages, axis=1)[:, : position + 1][:, -k.WINDOW :].astype(np.float32))
        scores = (
            np.einsum("kgd,ktd->kgt", turned[0].astype(np.float32).reshape(k.KV_HEADS, k.GROUP, k.DIM), held[0])
            * k.scale
        )
        shares = np.exp2(scores - scores.max(axis=2, keepdims=True))
        out[request] = np.einsum("kgt,ktd->kgd", shares / shares.sum(axis=2, keepdims=True), held[1]).reshape(
            heads, k.VALUE_DIM
        )


def advance(gpu: Gpu, count: int, k: SimpleNamespace) -> None:
    going = gpu.array(k.rows, (count,), "i4") >= 0
    tokens, positions = _integers(gpu, k.tokens, k.wide, count), _integers(gpu, k.positions, k.wide, count)
    logits = gpu.array(k.logits, (count, k.size), NUMBERS[k.kind])[going]
    with np.errstate(invalid="ignore"):
        found = np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)
    gpu.array(k.found_tokens, (count,), "i4")[going], tokens[going] = found, np.maximum(found, 0)
    positions[going] += 1


KERNELS: dict[str, Callable] = {"rotate": rotate, "decode_attention": decode_attention, "advance": advance}
for _unit in (2, 16):
    KERNELS[f"write_cache_{_unit}"] = lambda gpu, tokens, k, unit=_unit: write_cache(gpu, tokens, k, unit)


# --- TensorRT


class Engine:
    """ICudaEngine of a graph whose profiles are made for the limits that it carries."""

    def __init__(self, gpu: Gpu, wide: bool, data: bytes):
        from lockstep.backends.profiles import profiles
        from lockstep.onnx_tools.sessions import open_session

        self.gpu, self.wide, self.model = gpu, wide, onnx.ModelProto.FromString(data)
        self.session = open_session(data)
        self.profiles = profiles(self.model, json.loads(self.model.metadata_props[-1].value))
        self.num_optimization_profiles = len(self.profiles)
        self.names = [value.name for value in (*self.model.graph.input, *self.model.graph.output)]
        self.values = dict(zip(self.names, (*self.model.graph.input, *self.model.graph.output)))
        self.num_io_tensors = len(self.names)
        self.device_memory_size = self.device_memory_size_v2 = len(data)

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_mode(self, name):
        return MODES.INPUT if any(value.name == name for value in self.model.graph.input) else MODES.OUTPUT

    def get_tensor_dtype(self, name):
        return {1: KINDS.FLOAT, 10: KINDS.HALF, 7: KINDS.INT64 if self.wide else KINDS.INT32}[
            self.values[name].type.tensor_type.elem_type
        ]

    def get_tensor_shape(self, name):
        return tuple(-1 if dim.dim_param else dim.dim_value for dim in self.values[name].type.tensor_type.shape.dim)

    def get_tensor_profile_shape(self, name, profile):
        return self.profiles[profile].get(name, (self.get_tensor_shape(name),) * 3)

    def create_execution_context_without_device_memory(self):
        return Context(self)

    def create_execution_context(self, strategy):
        return Context(self)


class Context:
    """IExecutionContext: wants one run outside of a capture after its shapes were set."""

    def __init__(self, engine: Engine):
        self.engine, self.active_optimization_profile, self.shapes, self.addresses, self.ready, self.memory = (
            engine,
            0,
            {},
            {},
            False,
            (0, 0),
        )

    @property
    def device_memory(self):
        raise AttributeError("write only")

    @device_memory.setter
    def device_memory(self, address):
        self.memory = address, self.engine.device_memory_size

    def set_device_memory(self, address, size):
        if size < self.engine.device_memory_size:
            raise Fault(f"{size} bytes of device memory, {self.engine.device_memory_size} needed")
        self.memory = address, self.engine.device_memory_size

    def set_optimization_profile_async(self, number, stream):
        self.active_optimization_profile, self.shapes, self.ready = number, {}, False
        return True

    def set_input_shape(self, name, shape):
        if self.shapes.get(name) != tuple(shape):
            self.shapes[name], self.ready = tuple(shape), False
        low, _, high = self.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        return all(least <= size <= most for least, size, most in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        gpu, engine = self.engine.gpu, self.engine
        if gpu.capturing(stream) and not self.ready:
            return False
        gpu.plain += not gpu.capturing(stream)
        self.ready = True
        context, shapes, addresses, memory, captured = (
            weakref.ref(self),
            dict(self.shapes),
            dict(self.addresses),
            self.memory,
            gpu.capturing(stream),
        )
        dtype = lambda name: {KINDS.FLOAT: "f4", KINDS.HALF: "f2", KINDS.INT32: "i4", KINDS.INT64: "i8"}[
            engine.get_tensor_dtype(name)
        ]

        def run() -> None:
            if captured and (context() is None or context().shapes != shapes):
                raise Fault("the context of a captured run is gone, or has other shapes")
            gpu.bytes(*memory)[:] = POISON
            feeds, places = {}, []
            for value in engine.session.get_inputs():
                array = gpu.array(
                    addresses[value.name],
                    shapes.get(value.name, engine.get_tensor_shape(value.name)),
                    dtype(value.name),
                )
                places.append((addresses[value.name], addresses[value.name] + array.nbytes))
                feeds[value.name] = array.astype(np.int64) if array.dtype.kind == "i" else array
            for value, found in zip(engine.session.get_outputs(), engine.session.run(None, feeds)):
                to = addresses[value.name]
                if any(low < to + found.nbytes and to < high for low, high in places):
                    raise Fault(f"output {value.name} lies on an input")
                gpu.array(to, found.shape, dtype(value.name))[:] = found

        gpu.put(stream, run)
        return True


def tensorrt(gpu: Gpu, version: str) -> ModuleType:
    trt, wide = ModuleType("tensorrt"), not version.startswith("8.")

    class Runtime:
        def __init__(self, logger):
            pass

        def deserialize_cuda_engine(self, data):
            return Engine(gpu, wide, data)

    logger = type("ILogger", (), {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2})
    vars(trt).update(
        __version__=version,
        DataType=KINDS,
        TensorIOMode=MODES,
        Runtime=Runtime,
        ILogger=logger,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2),
    )
    return trt


# --- cuDNN


class Tensor(SimpleNamespace):
    """A tensor of a graph of cuDNN, hashed as the object that it is."""

    __hash__ = object.__hash__

    def _set(self, **values):
        vars(self).update(values)
        return self

    set_output = lambda self, value: self
    set_dim = lambda self, dim: self._set(dim=dim)
    set_stride = lambda self, stride: self._set(stride=stride)
    set_data_type = lambda self, kind: self._set(data_type=kind)


def cudnn(gpu: Gpu) -> ModuleType:
    module = ModuleType("cudnn")

    class Graph:
        def __init__(self, **settings):
            self.handle = settings["handle"]

        def tensor(self, **settings):
            return Tensor(**settings)

        def sdpa(self, **settings):
            self.asked, self.out = SimpleNamespace(**settings), Tensor()
            return self.out, None

        def get_workspace_size(self):
            return 512

        def execute(self, addresses, workspace, handle):
            gpu.plain += not gpu.capturing(handle["stream"])
            gpu.put(handle["stream"], lambda: attend(gpu, self.asked, self.out, addresses, workspace))

        validate = build_operation_graph = check_support = build_plans = lambda self: None
        create_execution_plans = lambda self, modes: None

    vars(module).update(
        create_handle=dict,
        destroy_handle=lambda handle: None,
        set_stream=lambda handle, stream: handle.update(stream=stream),
        pygraph=Graph,
        backend_version=lambda: 91900,
        cudnnGraphNotSupportedError=type("cudnnGraphNotSupportedError", (Exception,), {}),
        heur_mode=SimpleNamespace(A=0),
        diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT=1),
        data_type=SimpleNamespace(HALF="f2", BFLOAT16="bf16", FLOAT="f4", INT32="i4"),
    )
    return module


def attend(gpu: Gpu, asked: SimpleNamespace, out: Tensor, addresses: dict, workspace: int) -> None:
    """Attention over pages, of packed queries [requests, tokens, heads, dim]; all rows are touched, those behind a
    request's tokens are spoiled."""
    gpu.bytes(workspace, 512)[:] = POISON
    (requests, heads, tokens, dim), (_, kv_heads, page, value_dim) = asked.q.dim, asked.v.dim
    read = lambda tensor, shape: gpu.array(addresses[tensor], shape, tensor.data_type)
    query, result = read(asked.q, (requests, tokens, heads, dim)), read(out, (requests, tokens, heads, value_dim))
    keys, values = read(asked.k, asked.k.dim), read(asked.v, asked.v.dim)
    new, held = (read(tensor, (requests,)) for tensor in (asked.seq_len_q, asked.seq_len_kv))
    table = read(asked.paged_attention_k_table, (requests, asked.paged_attention_k_table.dim[2]))
    window = getattr(asked, "diagonal_band_left_bound", None)
    for request in range(requests):
        count, length = int(new[request]), int(held[request])
        pages = table[request, : -(-length // page)]
        k, v = (
            cache[pages]
            .swapaxes(1, 2)
            .reshape(-1, kv_heads, cache.shape[3])[:length]
            .astype(np.float32)
            .repeat(heads // kv_heads, axis=1)
            for cache in (keys, values)
        )
        scores = np.einsum("ihd,jhd->hij", query[request, :count].astype(np.float32), k) * asked.attn_scale
        at, past = length - count + np.arange(count)[:, None], np.arange(length)[None]
        seen = past <= at if hasattr(asked, "diagonal_band_right_bound") else np.ones((count, length), bool)
        seen = seen if window is None else seen & (past > at - window)
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result[request] = np.nan
        result[request, :count] = np.einsum("hij,jhd->ihd", shares / shares.sum(axis=-1, keepdims=True), v)


# --- all of it


@contextlib.contextmanager
def installed(version: str = "8.6.0") -> Iterator[Gpu]:
    """In place of what the machine has, or has not, until the end of the `with`: CUDA, cuDNN and TensorRT of this
    version, and our modules bound to them."""
    from lockstep.backends.tensorrt import backend, compat

    gpu, package, bindings = Gpu(), sys.modules["lockstep.backends.tensorrt"], ModuleType("cuda.bindings")
    parts = {"runtime": runtime(gpu), "nvrtc": nvrtc(), "driver": driver(gpu)}
    vars(bindings).update(parts)
    outer = ModuleType("cuda")
    outer.bindings = bindings
    given = {"cuda": outer, "cuda.bindings": bindings, "cudnn": cudnn(gpu)} | {
        f"cuda.bindings.{name}": part for name, part in parts.items()
    }
    before = {name: sys.modules.pop(name, None) for name in (*given, *OURS)}
    held = {name: vars(package).pop(name.rpartition(".")[2], None) for name in OURS}
    old = {name: getattr(compat, name) for name in ("trt", "_logger", "_runtime")}
    sys.modules.update(given)
    compat.trt, compat._logger, compat._runtime = tensorrt(gpu, version), None, None
    real = backend.TensorRTBackend.build
    backend.TensorRTBackend.build = lambda self, graph, out, options: _build(self, real, graph, out, options)
    try:
        yield gpu
    finally:
        backend.TensorRTBackend.build = real
        vars(compat).update(old)
        for name in (*given, *OURS):
            sys.modules.pop(name, None)
            if before[name] is not None:
                sys.modules[name] = before[name]
        for name in OURS:
            vars(package).pop(name.rpartition(".")[2], None)
            if held[name] is not None:
                setattr(package, name.rpartition(".")[2], held[name])


def _build(self, real: Callable, graph: Path, out: Path, options: dict):
    from lockstep.artifacts.files import sha256_file
    from lockstep.backends.base import Built
    from lockstep.backends.profiles import LIMITS

    if out.suffix != ".engine":
        return real(self, graph, out, options)
    model = onnx.load(graph)
    model.metadata_props.add(key="limits", value=json.dumps({name: options[name] for name in LIMITS}))
    out.write_bytes(model.SerializeToString())
    product = {
        "name": "product",
        "kind": "gemm",
        "tactic": "another" if out.parent.name == "again" and out.stem == "middle" else "one",
        "formats": [],
    }
    digest = self._tactics.take(out.stem, sha256_file(graph), [product], str(out))
    self._tactics.take_cache(b"cache", {}, str(out))
    return Built({"tactics_sha256": digest})
