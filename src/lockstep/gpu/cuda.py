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

_HOST_TO_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
_DEVICE_TO_HOST = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
_DEVICE_TO_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
_HOPPER = 9  # first number of its compute capability
_left_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_at_exit(owner: object) -> None:
    """Leave what an object holds to the operating system when the process ends.

    So it is with objects that are alive then. The interpreter takes objects and modules apart in any order: an engine
    that goes after its library's runtime, or a stream after the driver, would crash a process whose work is done.
    """
    _left_at_exit.add(owner)


@atexit.register
def _leave() -> None:
    for owner in _left_at_exit:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def destroy_with(owner: Any, destroy: Callable[..., Any], handle: Any) -> None:
    """Destroy what a handle stands for when nothing refers to its owner any more.

    That is behind the finalizers of all that goes with the owner: an executor's waits for its streams, whose work is in
    this memory. Where objects go in a cycle, the collector runs finalizers in any order; what it does not track, as an
    array, dies behind them.
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
    """Return how many devices this process sees (CUDA_VISIBLE_DEVICES)."""
    return int(check(runtime.cudaGetDeviceCount()))


def use_device(number: int) -> None:
    """Use a device in what the calling thread does from now on; at first that is device 0."""
    check(runtime.cudaSetDevice(number))


def current_device() -> int:
    """Return the number of the device that the calling thread uses."""
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
    """Return the compute capability of a device."""
    which = runtime.cudaDeviceAttr
    return tuple(
        check(runtime.cudaDeviceGetAttribute(getattr(which, f"cudaDevAttrComputeCapability{part}"), number))
        for part in ("Major", "Minor")
    )


def is_hopper(number: int = 0) -> bool:
    return compute_capability(number)[0] == _HOPPER


def multiprocessors(number: int = 0) -> int:
    """Return the number of multiprocessors of a device."""
    return int(check(runtime.cudaDeviceGetAttribute(runtime.cudaDeviceAttr.cudaDevAttrMultiProcessorCount, number)))


class Array:
    """Contiguous device memory: an address with shape and NumPy dtype; views keep it alive."""

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
        row = math.prod(tail) * self.dtype.itemsize if low else 0
        return Array(self.address + low * row, (max(0, high - low), *tail), self.dtype, self._owner)

    def reshape(self, *shape: int) -> Array:
        """Return the first numbers of the array in another shape. Raises ValueError for more numbers."""
        if math.prod(shape) > math.prod(self.shape):
            raise ValueError(f"expected at most {math.prod(self.shape)} numbers, found {shape}")
        return Array(self.address, shape, self.dtype, self._owner)


class _Memory:
    """An allocation on the device, or page-locked, freed with its last reference; what: it is for, in words."""

    def __init__(
        self, nbytes: int, what: str, allocate: Callable = runtime.cudaMalloc, free: Callable = runtime.cudaFree
    ):
        result = allocate(max(1, nbytes))
        if result[0] == runtime.cudaError_t.cudaErrorMemoryAllocation:
            kind = "page-locked"
            found = "less"
            if allocate is not runtime.cudaMallocHost:
                free_bytes, total = check(runtime.cudaMemGetInfo())
                kind = "GPU"
                found = f"{free_bytes >> 20} MiB of {total >> 20} MiB"
                found += f" on GPU {current_device()}" if device_count() > 1 else ""
            raise CheckError(
                f"expected {max(1, nbytes >> 20)} MiB of free {kind} memory for {what}, found {found}; lower "
                f"limits.max_batch_size, max_seq_len or max_num_tokens, or end what else uses it"
            )
        self.address = int(check(result))
        destroy_with(self, free, self.address)


def empty(shape: Sequence[int], dtype: DTypeLike, what: str = "an array") -> Array:
    """Return uninitialised device memory. Raises CheckError, saying `what` it is for, where there is too little."""
    dtype = np.dtype(dtype)
    memory = _Memory(math.prod(shape) * dtype.itemsize, what)
    return Array(memory.address, shape, dtype, memory)


def zeros(shape: Sequence[int], dtype: DTypeLike, what: str = "an array") -> Array:
    """Return device memory of zeros, see `filled`."""
    return filled(0, shape, dtype, what)


def filled(byte: int, shape: Sequence[int], dtype: DTypeLike, what: str = "an array") -> Array:
    """Return device memory of one byte, for any stream: it waits for the default one. Raises as `empty` does."""
    array = empty(shape, dtype, what)
    check(runtime.cudaMemset(array.address, byte, array.nbytes))
    check(runtime.cudaStreamSynchronize(0))
    return array


def pinned(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Return a page-locked host array, from and to which the device copies without waiting."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _Memory(nbytes, "copies to and from the GPU", runtime.cudaMallocHost, runtime.cudaFreeHost)
    buffer: Any = (ctypes.c_char * max(1, nbytes)).from_address(memory.address)
    buffer._memory = memory  # NumPy keeps the buffer, and this keeps the memory
    return np.frombuffer(buffer, np.uint8, nbytes).view(dtype).reshape(shape)


def memory_used() -> int:
    """Return the bytes of the device in use, by any process."""
    free, total = check(runtime.cudaMemGetInfo())
    return total - free


def memory_free() -> int:
    """Return the bytes of the device that are free."""
    free, _ = check(runtime.cudaMemGetInfo())
    return int(free)


class Stream:
    """A CUDA stream; work under way is done even when nothing refers to it any more."""

    def __init__(self) -> None:
        self.handle = int(check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
        self._synchronize = runtime.cudaStreamSynchronize
        destroy_with(self, runtime.cudaStreamDestroy, self.handle)

    def synchronize(self) -> None:
        check(self._synchronize(self.handle))

    def drain(self) -> None:
        """Wait until nothing is under way, without errors, for those who free memory: they were raised before."""
        self._synchronize(self.handle)

    def upload(self, array: Array, host: np.ndarray) -> None:
        """Copy from host to device; leave page-locked `host` alone until the stream is through: this does not wait."""
        if host.nbytes != array.nbytes or not host.flags.c_contiguous:
            raise ValueError(f"expected {array.nbytes} contiguous bytes, found {host.nbytes}")
        check(runtime.cudaMemcpyAsync(array.address, host.ctypes.data, host.nbytes, _HOST_TO_DEVICE, self.handle))

    def download(self, host: np.ndarray, array: Array) -> None:
        """Copy from device to host: synchronize, or wait for an event behind it, before reading."""
        check(runtime.cudaMemcpyAsync(host.ctypes.data, array.address, host.nbytes, _DEVICE_TO_HOST, self.handle))

    def copy(self, out: Array, source: Array) -> None:
        """Copy as many bytes as `out` has on the device."""
        self.copy_rows(out.address, out.nbytes, source.address, out.nbytes, out.nbytes, 1)

    def copy_rows(self, out: int, out_pitch: int, source: int, pitch: int, width: int, rows: int) -> None:
        """Copy `rows` rows of `width` bytes on the device; pitches are bytes from one row to the next."""
        check(runtime.cudaMemcpy2DAsync(out, out_pitch, source, pitch, width, rows, _DEVICE_TO_DEVICE, self.handle))

    def fill_zero(self, address: int, pitch: int, width: int, rows: int) -> None:
        check(runtime.cudaMemset2DAsync(address, pitch, 0, width, rows, self.handle))

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture what is put on the stream inside as the graph that is given; nothing runs before its `launch`."""
        graph = Graph()
        check(runtime.cudaStreamBeginCapture(self.handle, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed))
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
    """Captured work, launched as one."""

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
    """What a kernel has TMA read by: boxes of rows of an array [rows, bytes], swizzled, zeros beyond it."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)

    @classmethod
    def of(cls, array: Array, rows: int, columns: int) -> TensorMap:
        """Return that of boxes [rows, columns] of an array of bytes [rows, a multiple of 16]; it keeps the array."""
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
        made = cls((ctypes.c_uint64 * 16)(*map(int, encoded.opaque)))
        made.array = array
        return made


def _type_of(argument: Array | int | float) -> Any:
    """Return the ctypes type that a kernel takes an argument as."""
    number = ctypes.c_float if isinstance(argument, float) else ctypes.c_int32
    return ctypes.c_void_p if isinstance(argument, Array) else number


class Kernel:
    """A kernel of a module; arguments: Array (its address), int (int32), float (float32)."""

    def __init__(self, function: Any):
        self.function = function
        self._shared = 48 << 10
        self._types: dict[tuple[type, ...], tuple[Any, ...]] = {}  # by types of arguments

    def launch(
        self, stream: Stream, blocks: tuple[int, int, int] | int, threads: int, *arguments: Array | int | float
    ) -> None:
        values = tuple([argument.address if isinstance(argument, Array) else argument for argument in arguments])
        given = tuple(map(type, arguments))
        types = self._types.get(given)
        if types is None:
            types = self._types[given] = tuple(map(_type_of, arguments))
        x, y, z = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        check(driver.cuLaunchKernel(self.function, x, y, z, threads, 1, 1, 0, stream.handle, (values, types), 0))

    def allow_shared(self, nbytes: int) -> None:
        """Let launches have so many bytes of shared memory, which is asked for where it is more than 48 KiB."""
        if nbytes > self._shared:
            what = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(self.function, what, nbytes))
            self._shared = nbytes


class Launch:
    """A kernel on a stream with fixed arguments, all but the last, an integer.

    A call costs the host a third of `Kernel.launch`. overlaps: the kernel waits itself for the one before it on the
    stream (`wait_for_previous`), and may be brought onto the device while that one runs, where the device and its
    driver can do that, in graphs too. shared: bytes of shared memory, beside what the kernel declares.
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
        self._held = arguments
        self._values: list[Any] = [
            each if isinstance(each, TensorMap) else _type_of(each)(each.address if isinstance(each, Array) else each)
            for each in arguments
        ]
        self._last = self._values[-1]
        self._pointers = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(each) for each in self._values))
        self._address = ctypes.addressof(self._pointers)
        self._config = _overlapping(stream, threads, shared) if overlaps and _can_overlap(current_device()) else None

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


@functools.cache
def _can_overlap(number: int) -> bool:
    """Return whether launches can overlap: compute capability 9.0, and CUDA 12.4, which captures such launches."""
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
    """Compile CUDA C++ and load it, once a source and device. Raises CheckError with what the compiler says."""
    number = current_device()
    return _load(source, options, number, compute_capability(number))


@functools.cache
def _load(source: str, options: tuple[str, ...], number: int, capability: tuple[int, int]) -> _Module:
    check(runtime.cudaFree(0))  # makes the context that modules are loaded into
    return _Module(_compile(source, options, capability))


@functools.cache
def _compile(source: str, options: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    major, minor = capability
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    own = "a" if major == _HOPPER else ""  # with instructions that later ones have not: wgmma
    flags = [
        f"--gpu-architecture=sm_{major}{minor}{own}".encode(),
        b"--std=c++17",
        *(option.encode() for option in options),
    ]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(error) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CheckError(f"CUDA kernels: {' '.join(log.decode(errors='replace').strip(chr(0)).split())[:500]}")
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    return code


class _Module:
    """Kernels by name, on the device that was current when it was loaded."""

    def __init__(self, code: bytes):
        self._module = check(driver.cuModuleLoadData(code))
        self._kernels = dict[str, Kernel]()

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = Kernel(check(driver.cuModuleGetFunction(self._module, name.encode())))
        return self._kernels[name]
