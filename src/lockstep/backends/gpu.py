"""The compute capability of the GPU here, by the CUDA driver alone: what the config asks before a library is loaded."""

from __future__ import annotations

import ctypes
import functools

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h
_MAJOR = 75
_MINOR = 76


def compute_capability() -> str | None:
    """Return the compute capability of the first CUDA device ("8.9"); None without a driver or device."""
    return ask_driver()


def needs_gpu(capabilities: str, capability: str | None) -> str:
    """Return why engines for these compute capabilities do not run here.

    capability: of the GPU here; None without one.
    """
    gpu = f"one of {capability}" if capability else "none"
    return f"needs an NVIDIA GPU of compute capability {capabilities}, found {gpu}"


@functools.cache
def ask_driver() -> str | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    numbers = (ctypes.c_int(), ctypes.c_int())
    ok = not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0)
    for number, attribute in zip(numbers, (_MAJOR, _MINOR)):
        ok = ok and not cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return ".".join(str(number.value) for number in numbers) if ok else None
