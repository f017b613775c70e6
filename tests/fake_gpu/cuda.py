"""cuda-python's modules over the fake device: runtime, driver and the compiler of kernels."""

from __future__ import annotations

import ctypes
import enum
import json
import re
from types import ModuleType, SimpleNamespace
from typing import Any

from fake_gpu import compiled
from fake_gpu.device import COPIES, ERRORS, Fault, Gpu
from fake_gpu.kernels import KERNELS


def runtime(gpu: Gpu) -> ModuleType:
    module = ModuleType("cuda.bindings.runtime")
    done = (ERRORS.cudaSuccess,)
    attributes = enum.IntEnum(
        "cudaDeviceAttr",
        "cudaDevAttrComputeCapabilityMajor cudaDevAttrComputeCapabilityMinor cudaDevAttrMultiProcessorCount",
    )
    vars(module).update(
        cudaError_t=ERRORS, cudaMemcpyKind=COPIES, cudaStreamNonBlocking=1, cudaDeviceAttr=attributes,
        cudaStreamCaptureMode=SimpleNamespace(cudaStreamCaptureModeRelaxed=2),
        cudaDeviceGetAttribute=lambda which, device: (ERRORS.cudaSuccess, 10 - which),
        cudaGetDeviceCount=lambda: (ERRORS.cudaSuccess, gpu.devices),
        cudaGetDevice=lambda: (ERRORS.cudaSuccess, gpu.device), cudaSetDevice=gpu.set_device,
        cudaDeviceCanAccessPeer=gpu.can_access, cudaDeviceEnablePeerAccess=gpu.enable_access, cudaMalloc=gpu.malloc,
        cudaFree=gpu.free, cudaMallocHost=gpu.malloc_host, cudaFreeHost=gpu.free_host,
        cudaHostRegister=gpu.register_host, cudaHostRegisterDefault=0,
        cudaMemGetInfo=lambda: (ERRORS.cudaSuccess, gpu.unused, gpu.total), cudaMemset=gpu.memset,
        cudaMemset2DAsync=gpu.memset_rows, cudaMemcpy=gpu.copy_now, cudaMemcpyAsync=gpu.copy,
        cudaMemcpy2DAsync=gpu.copy_rows, cudaStreamCreate=gpu.create_blocking_stream,
        cudaStreamCreateWithFlags=gpu.create_stream, cudaStreamSynchronize=gpu.synchronize,
        cudaStreamDestroy=lambda stream: done, cudaStreamBeginCapture=gpu.begin_capture,
        cudaStreamEndCapture=gpu.end_capture,
        cudaGraphInstantiate=lambda graph, flags: (ERRORS.cudaSuccess, list(graph)),
        cudaGraphDestroy=lambda graph: done, cudaGraphExecDestroy=lambda graph: done, cudaGraphLaunch=gpu.launch_graph,
        cudaEventCreate=gpu.create_event, cudaEventRecord=gpu.record, cudaEventDestroy=lambda event: done,
        cudaEventSynchronize=gpu.wait,
        cudaEventElapsedTime=lambda first, last: (ERRORS.cudaSuccess, (last[1] - first[1]) * 1e3),
    )  # fmt: skip
    return module


def nvrtc() -> ModuleType:
    """The compiler: it makes of a source, by kernel, its parameters [(name, kind)] and the numbers that the source is
    compiled for."""
    module = ModuleType("cuda.bindings.nvrtc")
    done = (0,)
    sources: list[str] = []
    defined: dict[int, dict[str, int]] = {}

    def create(source: bytes, name: bytes, count: int, texts: list[bytes], names: list[bytes]):
        sources.append(compiled.flat(source.decode(), {key.decode(): text.decode() for key, text in zip(names, texts)}))
        return 0, len(sources) - 1

    def compile_program(program: int, count: int, flags: list[bytes]):
        pairs = (flag.decode()[2:].split("=") for flag in flags if flag.startswith(b"-D"))
        defined[program] = {name: int(value) for name, value in pairs}
        return done

    def code(program: int) -> bytes:
        source = sources[program].replace("\\\n", " ")
        text = source.replace("__restrict__", "")
        begin = r'extern "C" __global__ void\s+'
        bounds = r"(?:__(?:cluster_dims|launch_bounds)__\([^)]*\)\s+)*"
        kernels = dict(re.findall(rf"{begin}{bounds}(\w+)\(([^)]*)\)", text))
        kernels.pop("NAME", None)
        for macro, arguments in re.findall(rf"#define (\w+)\(NAME[^)]*\)\s+{begin}{bounds}NAME\(([^)]*)\)", text):
            kernels |= dict.fromkeys(re.findall(rf"^{macro}\((\w+)", source, re.MULTILINE), arguments)
        parameters = {}
        for name, declared in kernels.items():
            pairs = [(part.split()[-1].strip("*"), _kind(part)) for part in declared.split(",")]
            parameters[name] = (pairs, defined[program])
        kind = defined[program].get("KIND", 1)
        on_host = {name: compiled.source(sources[program], name, kind) for name in kernels if name not in KERNELS}
        return json.dumps({"parameters": parameters, "on_host": on_host}).encode()

    def fill(program: int, out: bytes):
        ctypes.memmove(out, code(program), len(out))
        return done

    vars(module).update(
        nvrtcCreateProgram=create, nvrtcCompileProgram=compile_program,
        nvrtcGetCUBINSize=lambda program: (0, len(code(program))), nvrtcGetCUBIN=fill, nvrtcVersion=lambda: (0, 12, 9),
    )  # fmt: skip
    return module


TYPES = {"pointer": ctypes.c_void_p, "integer": ctypes.c_int32, "map": ctypes.c_uint64 * 16}


def _kind(parameter: str) -> str:
    if "TensorMap" in parameter:
        return "map"
    return "pointer" if "*" in parameter else "integer"


def _read(address: int, parameters: list[tuple[str, str]]) -> tuple[list[Any], list[type]]:
    """Arguments by the addresses of their values, as a launch may give them: pointers, integers and maps of TMA."""
    places = (ctypes.c_void_p * len(parameters)).from_address(address)
    types = [TYPES[kind] for _, kind in parameters]
    values = [kind.from_address(place) for kind, place in zip(types, places)]
    return [list(value) if isinstance(value, ctypes.Array) else value.value for value in values], types


def _encode_map(kind, rank, address, sizes, strides, box, steps, *arguments) -> tuple[int, SimpleNamespace]:
    """cuTensorMapEncodeTiled: of arrays of bytes, in its own form."""
    if rank != 2 or address % 16 or strides != [sizes[0]] or sizes[0] % 16 or max(box) > 256 or steps != [1, 1]:
        raise Fault(f"cuTensorMapEncodeTiled: {sizes} numbers at {address}, boxes of {box}")
    return 0, SimpleNamespace(opaque=[address, *sizes, *box, *[0] * 11])


def driver(gpu: Gpu) -> ModuleType:
    module = ModuleType("cuda.bindings.driver")
    result = enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0})
    attributes = enum.IntEnum(
        "CUdevice_attribute",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    )

    def launch(function, x, y, z, threads, *arguments):
        name, parameters, defined, on_host, home = function
        *_, stream, pointers, extra = arguments
        values, types = pointers if isinstance(pointers, tuple) else _read(pointers, parameters)
        if len(values) != len(parameters) or any(
            (type_ is ctypes.c_void_p) != (kind == "pointer")
            for type_, (_, kind) in zip(types, parameters, strict=True)
        ):
            raise Fault(f"kernel {name}: expected {parameters}, found {types}")
        named = SimpleNamespace(
            grid=(x, y, z),
            shared=arguments[2],
            **defined,
            **{parameter: value for (parameter, _), value in zip(parameters, values)},
        )
        gpu.plain += not gpu.capturing(stream)
        if on_host is not None:

            def run() -> None:
                arguments = [
                    named.state if parameter == "lost" else value for (parameter, _), value in zip(parameters, values)
                ]
                for units, argument in re.findall(r"RowSum<(\d+), .* sum\(.* (in\d+) \+", on_host):
                    terms = {**vars(named), "values": vars(named)[argument], "units": x * int(units)}
                    KERNELS["all_reduce"](gpu, x, SimpleNamespace(**terms, kind=named.KIND, shots=1))
                compiled.run(on_host, gpu, x, threads, types, arguments)  # `lost` is of the host

            gpu.launch(stream, home, run)
            return (result.CUDA_SUCCESS,)
        gpu.launch(stream, home, lambda: KERNELS[name](gpu, x, named))
        return (result.CUDA_SUCCESS,)

    def launch_with(config, function, pointers, extra):
        (attribute,) = config.attrs
        if config.numAttrs != 1 or attribute.value.programmaticStreamSerializationAllowed != 1:
            raise Fault("cuLaunchKernelEx: expected one attribute")
        sizes = config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, 1, 1, config.sharedMemBytes
        return launch(function, *sizes, config.hStream, pointers, extra)

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
        CUtensorMapDataType=SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_UINT8=0),
        CUtensorMapInterleave=SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0),
        CUtensorMapSwizzle=SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B=3),
        CUtensorMapL2promotion=SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3),
        CUtensorMapFloatOOBfill=SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0),
        cuuint32_t=int,
        cuuint64_t=int,
        cuTensorMapEncodeTiled=_encode_map,
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
