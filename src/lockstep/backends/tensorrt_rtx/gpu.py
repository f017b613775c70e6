"""Whether a GPU here runs TensorRT-RTX's engines, by the CUDA driver alone.

The library is not asked. In: the compute capabilities that engines were built for. Out: nothing, or why they cannot run
here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

PORTABLE = "8.0, 8.6, 8.9 or 12.x"
_PORTABLE_BELOW_12 = ("8.0", "8.6", "8.9")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h


def why_not(built_for: Sequence[str] | None) -> str | None:
    """Return why engines for these compute capabilities cannot run here.

    built_for: None is portable. Returns None where they can run.
    """
    wanted = PORTABLE if built_for is None else " or ".join(filter(None, [", ".join(built_for[:-1]), built_for[-1]]))
    found = compute_capability()
    if found and runs_on(found, built_for):
        return None
    return f"no GPU of compute capability {wanted}" + (f" (found one of {found})" if found else "")


def runs_on(capability: str, built_for: Sequence[str] | None) -> bool:
    """Return whether a GPU of a compute capability runs such engines.

    A portable engine runs on everything from 12.0, as TensorRT-RTX says when it refuses a device.
    """
    if built_for is not None:
        return capability in built_for
    return capability in _PORTABLE_BELOW_12 or int(capability.partition(".")[0]) >= 12


@functools.cache
def compute_capability() -> str | None:
    """Return the compute capability of the first CUDA device ("8.9").

    None where there is no driver or no device.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    ok = not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0)
    for number, attribute in zip(numbers, (_MAJOR, _MINOR)):
        ok = ok and not cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return ".".join(str(number.value) for number in numbers) if ok else None
