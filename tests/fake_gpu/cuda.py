"""cuda-python's modules over the fake device: runtime, driver and the compiler of kernels."""

from __future__ import annotations

import ctypes
import enum
import json
import re
from types import ModuleType, SimpleNamespace

from fake_gpu import compiled
from fake_gpu.device import COPIES, ERRORS, Fault, Gpu
from fake_gpu.kernels import KERNELS


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
        cudaGetDeviceCount=lambda: (ERRORS.cudaSuccess, gpu.devices),
        cudaGetDevice=lambda: (ERRORS.cudaSuccess, gpu.device),
        cudaSetDevice=gpu.set_device,
        cudaDeviceCanAccessPeer=gpu.can_access,
        cudaDeviceEnablePeerAccess=gpu.enable_access,
        cudaMalloc=gpu.malloc,
        cudaFree=gpu.free,
        cudaMallocHost=gpu.malloc_host,
        cudaFreeHost=gpu.free_host,
        cudaMemGetInfo=lambda: (ERRORS.cudaSuccess, gpu.unused, gpu.total),
        cudaMemset=gpu.memset,
        cudaMemset2DAsync=gpu.memset_rows,
        cudaMemcpy=gpu.copy_now,
        cudaMemcpyAsync=gpu.copy,
        cudaMemcpy2DAsync=gpu.copy_rows,
        cudaStreamCreate=gpu.create_blocking_stream,
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
                source.replace("__restrict__", ""),
            )
        )
        if template := kernels.pop("NAME", None):
            kernels |= dict.fromkeys(
                re.findall(r"^(?:WRITE|GEMV|FEW_ROWS|EXPAND)\((\w+)", source, re.MULTILINE), template
            )
        parameters = {
            name: ([(part.split()[-1].strip("*"), "*" in part) for part in text.split(",")], defined[program])
            for name, text in kernels.items()
        }
        on_host = {name: compiled.source(sources[program].decode(), name) for name in kernels if name not in KERNELS}
        return json.dumps({"parameters": parameters, "on_host": on_host}).encode()

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


def _read(address: int, parameters: list[tuple[str, bool]]) -> tuple[list[int], list[type]]:
    """Arguments by the addresses of their values, as a launch may give them: pointers and integers."""
    places = (ctypes.c_void_p * len(parameters)).from_address(address)
    types: list[type] = [ctypes.c_void_p if pointer else ctypes.c_int32 for _, pointer in parameters]
    return [kind.from_address(place).value for kind, place in zip(types, places)], types


def driver(gpu: Gpu) -> ModuleType:
    module, result = ModuleType("cuda.bindings.driver"), enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0})
    attributes = enum.IntEnum(
        "CUdevice_attribute",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    )

    def launch(function, x, y, z, threads, *rest):
        name, parameters, defined, on_host, home = function
        *_, stream, given, extra = rest
        values, types = given if isinstance(given, tuple) else _read(given, parameters)
        if len(values) != len(parameters) or any(
            (kind is ctypes.c_void_p) != pointer for kind, (_, pointer) in zip(types, parameters, strict=True)
        ):
            raise Fault(f"kernel {name}: expected {parameters}, found {types}")
        named = SimpleNamespace(
            grid=(x, y, z),
            shared=rest[2],
            **defined,
            **{parameter: value for (parameter, _), value in zip(parameters, values)},
        )
        gpu.plain += not gpu.capturing(stream)
        if on_host is not None:
            gpu.launch(stream, home, lambda: compiled.run(on_host, gpu, x, threads, types, values))
            return (result.CUDA_SUCCESS,)
        gpu.launch(stream, home, lambda: KERNELS[name](gpu, x, named))
        return (result.CUDA_SUCCESS,)

    def launch_with(config, function, given, extra):
        (attribute,) = config.attrs
        if config.numAttrs != 1 or attribute.value.programmaticStreamSerializationAllowed != 1:
            raise Fault("cuLaunchKernelEx: expected one attribute")
        sizes = config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, 1, 1, config.sharedMemBytes
        return launch(function, *sizes, config.hStream, given, extra)

    vars(module).update(
        CUresult=result,
        CUlaunchConfig=SimpleNamespace,
        CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace()),
        CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
        cuLaunchKernelEx=launch_with,
        CUdevice_attribute=attributes,
        cuInit=lambda flags: (result.CUDA_SUCCESS,),
        cuDeviceGet=lambda number: (result.CUDA_SUCCESS, number),
        cuDeviceGetName=lambda size, device: (result.CUDA_SUCCESS, gpu.names.get(device, b"fake\0")),
        cuDeviceGetAttribute=lambda which, device: (result.CUDA_SUCCESS, 10 - which),
        cuDeviceTotalMem=lambda device: (result.CUDA_SUCCESS, gpu.total),
        cuDriverGetVersion=lambda: (result.CUDA_SUCCESS, 12040),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
        cuFuncSetAttribute=lambda function, which, value: (result.CUDA_SUCCESS,),
        cuModuleLoadData=lambda code: (result.CUDA_SUCCESS, (json.loads(code), gpu.device)),
        cuLaunchKernel=launch,
        cuModuleGetFunction=lambda module, name: (
            result.CUDA_SUCCESS,
            (
                name.decode(),
                *module[0]["parameters"][name.decode()],
                module[0]["on_host"].get(name.decode()),
                module[1],
            ),
        ),
    )
    return module
