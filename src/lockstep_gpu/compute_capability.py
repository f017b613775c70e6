"""What the config asks of the GPU here, by the CUDA driver alone, before a library is loaded."""

from __future__ import annotations

import ctypes
import functools

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h
_MAJOR = 75
_MINOR = 76


def compute_capability() -> str | None:
    """Return the compute capability of the first CUDA device ("8.9"); None without a driver or device."""
    return ask_driver()


def total_memory() -> int:
    """Return the bytes of memory of the first CUDA device; 0 without one."""
    size = ctypes.c_size_t()
    opened = _device()
    if opened is not None:
        cuda, device = opened
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return size.value


@functools.cache
def ask_driver() -> str | None:
    opened = _device()
    if opened is None:
        return None
    cuda, device = opened
    numbers = (ctypes.c_int(), ctypes.c_int())
    ok = True
    for number, attribute in zip(numbers, (_MAJOR, _MINOR)):
        ok = ok and not cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return ".".join(str(number.value) for number in numbers) if ok else None


def _device() -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """Return the CUDA driver and its first device; None without either."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    is_there = not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0)
    return (cuda, device) if is_there else None
