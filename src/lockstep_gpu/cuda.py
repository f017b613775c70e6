"""CUDA through cuda-python (12 or 13): memory, streams, graphs, events, and kernels that NVRTC compiles."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc, runtime
from numpy.typing import DTypeLike

from lockstep.errors import CheckError
from lockstep.processes import paused_collector
from lockstep_gpu import kernel_cache
from lockstep_gpu.kernels.library import library

_HOST_TO_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
_DEVICE_TO_HOST = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
_DEVICE_TO_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
_HOPPER = 9  # major compute capability
_leaked_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()


def leak_at_exit(owner: object) -> None:
    """Leave an object's resources to the operating system if it is alive when the process ends.

    At shutdown the interpreter destroys objects and modules in any order. An engine destroyed after its library's
    runtime, or a stream after the driver, would crash a process whose work is done.
    """
    _leaked_at_exit.add(owner)


@atexit.register
def _leak() -> None:
    for owner in _leaked_at_exit:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def destroy_with(owner: Any, destroy: Callable[..., Any], handle: Any) -> None:
    """Call `destroy(handle)` when the owner is garbage, after the finalizers of all objects that die with it.

    The order matters: an executor's finalizer waits for its streams, whose kernels use this memory. In a reference
    cycle the collector runs finalizers in any order, but an object that it doesn't track, such as an array, dies last.
    """
    owner.life = np.empty(0)
    weakref.finalize(owner.life, destroy, handle).atexit = False


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a cuda-python call. Raises CheckError with the name that CUDA gives the error."""
    error, *values = result
    if int(error) != 0:
        raise CheckError(f"CUDA: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def device_count() -> int:
    """Return the number of devices visible to this process (CUDA_VISIBLE_DEVICES)."""
    return int(check(runtime.cudaGetDeviceCount()))


def use_device(number: int) -> None:
    """Set the calling thread's current device; a new thread starts with device 0."""
    check(runtime.cudaSetDevice(number))


def current_device() -> int:
    """Return the number of the calling thread's current device."""
    return int(check(runtime.cudaGetDevice()))


def can_access(number: int, other: int) -> bool:
    """Return whether kernels of a device can read and write the memory of another."""
    return number == other or bool(check(runtime.cudaDeviceCanAccessPeer(number, other)))


def enable_access(other: int) -> None:
    """Let kernels of the current device read and write the memory of device `other`."""
    if other == current_device():
        return
    (error,) = runtime.cudaDeviceEnablePeerAccess(other, 0)
    if error != runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled:
        check((error,))


def compute_capability(number: int = 0) -> tuple[int, int]:
    """Return a device's compute capability as (major, minor)."""
    attributes = runtime.cudaDeviceAttr
    major = check(runtime.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMajor, number))
    minor = check(runtime.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMinor, number))
    return major, minor


def is_hopper(number: int = 0) -> bool:
    return compute_capability(number)[0] == _HOPPER


def multiprocessors(number: int = 0) -> int:
    """Return the number of multiprocessors of a device."""
    return int(check(runtime.cudaDeviceGetAttribute(runtime.cudaDeviceAttr.cudaDevAttrMultiProcessorCount, number)))


class Array:
    """Contiguous device memory: an address with a shape and a NumPy dtype. Views keep the memory alive."""

    def __init__(self, address: int, shape: Sequence[int], dtype: DTypeLike, owner: object):
        self.address = address
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self._owner = owner

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Array:
        """Return rows `low:high` of the first axis."""
        count, *tail = self.shape
        low, high, step = rows.indices(count)
        if step != 1:
            raise ValueError("expected rows without a step")
        row_nbytes = math.prod(tail) * self.dtype.itemsize
        return Array(self.address + low * row_nbytes, (max(0, high - low), *tail), self.dtype, self._owner)

    def reshape(self, *shape: int) -> Array:
        """Return the array's first elements in another shape. Raises ValueError if it has too few elements."""
        if math.prod(shape) > math.prod(self.shape):
            raise ValueError(f"expected at most {math.prod(self.shape)} numbers, found {shape}")
        return Array(self.address, shape, self.dtype, self._owner)


class _Memory:
    """An allocation on the device or in page-locked memory, freed with its last reference; what: names it in errors."""

    def __init__(
        self, nbytes: int, what: str, allocate: Callable = runtime.cudaMalloc, free: Callable = runtime.cudaFree
    ):
        result = allocate(max(1, nbytes))
        if result[0] == runtime.cudaError_t.cudaErrorMemoryAllocation:
            if allocate is runtime.cudaMallocHost:
                kind = "page-locked"
                available = "less"
            else:
                kind = "GPU"
                available = _describe_free_memory()
            raise CheckError(
                f"expected {max(1, nbytes >> 20)} MiB of free {kind} memory for {what}, found {available}; lower "
                f"limits.max_batch_size, max_seq_len or max_num_tokens, or end what else uses it"
            )
        self.address = int(check(result))
        destroy_with(self, free, self.address)


def _describe_free_memory() -> str:
    free, total = check(runtime.cudaMemGetInfo())
    text = f"{free >> 20} MiB of {total >> 20} MiB"
    if device_count() > 1:
        text += f" on GPU {current_device()}"
    return text


def empty(shape: Sequence[int], dtype: DTypeLike, what: str = "an array") -> Array:
    """Return uninitialised device memory. Raises CheckError, which names its use (`what`), if there is too little."""
    dtype = np.dtype(dtype)
    memory = _Memory(math.prod(shape) * dtype.itemsize, what)
    return Array(memory.address, shape, dtype, memory)


def zeros(shape: Sequence[int], dtype: DTypeLike, what: str = "an array") -> Array:
    """Return device memory filled with zeros: see `filled`."""
    return filled(0, shape, dtype, what)


def filled(byte: int, shape: Sequence[int], dtype: DTypeLike, what: str = "an array") -> Array:
    """Return device memory filled with one byte; any stream may use it at once. Raises as `empty` does."""
    array = empty(shape, dtype, what)
    check(runtime.cudaMemset(array.address, byte, array.nbytes))
    check(runtime.cudaStreamSynchronize(0))
    return array


def pinned(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Return a page-locked host array, which the device can copy from and to asynchronously."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _Memory(nbytes, "copies to and from the GPU", runtime.cudaMallocHost, runtime.cudaFreeHost)
    buffer: Any = (ctypes.c_char * max(1, nbytes)).from_address(memory.address)
    buffer._memory = memory  # NumPy keeps the buffer alive, and the buffer keeps the memory
    return np.frombuffer(buffer, np.uint8, nbytes).view(dtype).reshape(shape)


def lock_pages(memory: np.ndarray) -> bool:
    """Page-lock host memory until the process ends; return whether the system allowed it."""
    (error,) = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, runtime.cudaHostRegisterDefault)
    return bool(error == runtime.cudaError_t.cudaSuccess)


def memory_used() -> int:
    """Return the device memory in use by all processes, in bytes."""
    free, total = check(runtime.cudaMemGetInfo())
    return total - free


def memory_free() -> int:
    """Return the free device memory, in bytes."""
    free, _ = check(runtime.cudaMemGetInfo())
    return int(free)


class Stream:
    """A CUDA stream. Enqueued work completes even if the stream object is garbage by then."""

    def __init__(self) -> None:
        self.handle = int(check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
        self._synchronize = runtime.cudaStreamSynchronize
        destroy_with(self, runtime.cudaStreamDestroy, self.handle)

    def synchronize(self) -> None:
        check(self._synchronize(self.handle))

    def drain(self) -> None:
        """Wait for all work and ignore errors, which were raised before: for callers that free memory."""
        self._synchronize(self.handle)

    def upload(self, array: Array, host: np.ndarray) -> None:
        """Copy from host to device, asynchronously: don't change page-locked `host` before the copy is done."""
        if host.nbytes != array.nbytes or not host.flags.c_contiguous:
            raise ValueError(f"expected {array.nbytes} contiguous bytes, found {host.nbytes}")
        check(runtime.cudaMemcpyAsync(array.address, host.ctypes.data, host.nbytes, _HOST_TO_DEVICE, self.handle))

    def download(self, host: np.ndarray, array: Array) -> None:
        """Copy from device to host, asynchronously: synchronize, or wait for a later event, before reading."""
        check(runtime.cudaMemcpyAsync(host.ctypes.data, array.address, host.nbytes, _DEVICE_TO_HOST, self.handle))

    def copy(self, out: Array, source: Array) -> None:
        """Copy `out.nbytes` bytes on the device."""
        self.copy_rows(out.address, out.nbytes, source.address, out.nbytes, out.nbytes, 1)

    def copy_rows(self, out: int, out_pitch: int, source: int, pitch: int, width: int, rows: int) -> None:
        """Copy `rows` rows of `width` bytes on the device; a pitch is the bytes from one row to the next."""
        check(runtime.cudaMemcpy2DAsync(out, out_pitch, source, pitch, width, rows, _DEVICE_TO_DEVICE, self.handle))

    def fill_zero(self, address: int, pitch: int, width: int, rows: int) -> None:
        check(runtime.cudaMemset2DAsync(address, pitch, 0, width, rows, self.handle))

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture the work enqueued in the `with` block as the yielded graph; it runs when the graph is launched.

        Garbage is not collected meanwhile: to free what it may hold on the device waits for the device, for which a
        capture can be invalid.
        """
        graph = Graph()
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        with paused_collector():
            check(runtime.cudaStreamBeginCapture(self.handle, mode))
            try:
                yield graph
            except BaseException:
                runtime.cudaStreamEndCapture(self.handle)
                raise
            captured = check(runtime.cudaStreamEndCapture(self.handle))
        graph.executable = check(runtime.cudaGraphInstantiate(captured, 0))
        destroy_with(graph, runtime.cudaGraphExecDestroy, graph.executable)
        check(runtime.cudaGraphDestroy(captured))


class Graph:
    """A captured CUDA graph."""

    executable: Any = None

    def launch(self, stream: Stream) -> None:
        check(runtime.cudaGraphLaunch(self.executable, stream.handle))


class Event:
    """A CUDA event: a moment on a stream."""

    def __init__(self) -> None:
        self.handle = check(runtime.cudaEventCreate())
        destroy_with(self, runtime.cudaEventDestroy, self.handle)

    def record(self, stream: Stream) -> None:
        check(runtime.cudaEventRecord(self.handle, stream.handle))

    def wait(self) -> None:
        check(runtime.cudaEventSynchronize(self.handle))

    def milliseconds_since(self, earlier: Event) -> float:
        return float(check(runtime.cudaEventElapsedTime(earlier.handle, self.handle)))


class TensorMap(ctypes.Structure):
    """A TMA descriptor: boxes of rows of an array [rows, bytes], swizzled, with zeros out of bounds."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)

    @classmethod
    def of(cls, array: Array, rows: int, columns: int) -> TensorMap:
        """Return the descriptor of boxes [rows, columns] of an array of bytes [height, a multiple of 16]."""
        height, width = array.shape
        sizes = map(driver.cuuint64_t, (width, height))
        box = map(driver.cuuint32_t, (columns, rows))
        encoded = check(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, array.address, [*sizes],
                [driver.cuuint64_t(width)], [*box], [driver.cuuint32_t(1)] * 2,
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )  # fmt: skip
        tensor_map = cls((ctypes.c_uint64 * 16)(*map(int, encoded.opaque)))
        tensor_map.array = array  # keeps the memory alive
        return tensor_map


def _type_of(argument: Array | int | float) -> Any:
    """Return the ctypes type of a kernel argument."""
    if isinstance(argument, Array):
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_int32


class Kernel:
    """A kernel of a module. Arguments: an Array (its address), an int (int32) or a float (float32)."""

    def __init__(self, function: Any):
        self.function = function
        self._shared = 48 << 10  # the dynamic shared memory that CUDA allows by default
        self._types: dict[tuple[type, ...], tuple[Any, ...]] = {}  # ctypes types by Python types of the arguments

    def launch(
        self, stream: Stream, blocks: tuple[int, int, int] | int, threads: int, *arguments: Array | int | float
    ) -> None:
        values = tuple([argument.address if isinstance(argument, Array) else argument for argument in arguments])
        python_types = tuple(map(type, arguments))
        types = self._types.get(python_types)
        if types is None:
            types = self._types[python_types] = tuple(map(_type_of, arguments))
        x, y, z = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        check(driver.cuLaunchKernel(self.function, x, y, z, threads, 1, 1, 0, stream.handle, (values, types), 0))

    def allow_shared(self, nbytes: int) -> None:
        """Allow launches with `nbytes` bytes of dynamic shared memory."""
        if nbytes > self._shared:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(self.function, attribute, nbytes))
            self._shared = nbytes


class Launch:
    """A kernel on a stream whose arguments are fixed, except the last one, an integer.

    A call costs the host a third of `Kernel.launch`.

    Args:
        overlaps: The kernel itself waits for the previous one on the stream (`wait_for_previous`), so it may be
            scheduled while that one runs (programmatic dependent launch), in graphs too.
        shared: Bytes of dynamic shared memory.
    """

    def __init__(
        self, kernel: Kernel, stream: Stream, threads: int, *arguments: Array | TensorMap | int | float,
        overlaps: bool = False, shared: int = 0,
    ):  # fmt: skip
        kernel.allow_shared(shared)
        self._shared = shared
        self._function = kernel.function
        self._stream = stream
        self._threads = threads
        self._arguments = arguments  # keeps their memory alive
        self._values = [_ctypes_value(argument) for argument in arguments]
        self._last = self._values[-1]
        self._pointers = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        self._address = ctypes.addressof(self._pointers)
        self._config = None
        if overlaps and _can_overlap(current_device()):
            self._config = _overlapping(stream, threads, shared)

    def __call__(self, blocks: int, last: int | None = None) -> None:
        if last is not None:
            self._last.value = last
        if self._config is not None:
            self._config.gridDimX = blocks
            check(driver.cuLaunchKernelEx(self._config, self._function, self._address, 0))
            return
        threads = self._threads
        stream = self._stream.handle
        shared = self._shared
        check(driver.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, shared, stream, self._address, 0))


def _ctypes_value(argument: Array | TensorMap | int | float) -> Any:
    if isinstance(argument, TensorMap):
        return argument
    return _type_of(argument)(argument.address if isinstance(argument, Array) else argument)


@functools.cache
def _can_overlap(number: int) -> bool:
    """Return whether a device supports overlapping launches: capability 9.0, and CUDA 12.4, which can capture them."""
    return compute_capability(number) >= (9, 0) and int(check(driver.cuDriverGetVersion())) >= 12040


def _overlapping(stream: Stream, threads: int, shared: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    config = driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = threads
    config.hStream = stream.handle
    config.sharedMemBytes = shared
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


def compile_kernels(source: str, options: tuple[str, ...] = ()) -> _Module:
    """Compile and load CUDA C++, once per source, options and device; it may include files of `kernels.library`.

    Raises CheckError with the compiler's log.
    """
    number = current_device()
    return _load(source, options, number, compute_capability(number))


@functools.cache
def _load(source: str, options: tuple[str, ...], number: int, capability: tuple[int, int]) -> _Module:
    check(runtime.cudaFree(0))  # creates the context that modules are loaded into
    return _Module(compile_source(source, options, capability))


@functools.cache
def compile_source(source: str, options: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    major, minor = capability
    suffix = "a" if major == _HOPPER else ""  # sm_90a has wgmma, which later architectures dropped
    flags = [
        f"--gpu-architecture=sm_{major}{minor}{suffix}".encode(),
        b"--std=c++17",
        *(option.encode() for option in options),
    ]
    names = [name.encode() for name in library()]
    texts = [text.encode() for text in library().values()]
    version = str(check(nvrtc.nvrtcVersion())).encode()
    path = kernel_cache.entry_path([version, *flags, source.encode(), *names, *texts])
    code = kernel_cache.read(path)
    if code is None:
        code = _compile(source.encode(), names, texts, flags)
        kernel_cache.write(path, code)
    return code


def _compile(source: bytes, names: list[bytes], texts: list[bytes], flags: list[bytes]) -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(source, b"kernels.cu", len(names), texts, names))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(error) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CheckError(f"CUDA kernels: {' '.join(log.decode(errors='replace').strip(chr(0)).split())[:500]}")
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    return code


class _Module:
    """A compiled module: module["name"] is a kernel, on the device that was current at loading."""

    def __init__(self, code: bytes):
        self._module = check(driver.cuModuleLoadData(code))
        self._kernels = dict[str, Kernel]()

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = Kernel(check(driver.cuModuleGetFunction(self._module, name.encode())))
        return self._kernels[name]
