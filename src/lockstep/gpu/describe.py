"""What an engine depends on in a GPU (name, compute capability, driver), without an import of CUDA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

_DRIVER = Path("/proc/driver/nvidia/version")


def describe_gpu(where: str, ordinal: int = 0) -> dict[str, Any]:
    """Return the description of a CUDA device.

    It is {"type", "name", "compute_capability", "driver", "memory"} (memory in bytes). ordinal: the device's number,
    the first one's by default. where: opens the line of an error, such as `backend cuda`. Raises InputError where there
    is no CUDA driver or no GPU.
    """
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        raise InputError(
            f"{where}: needs the Python package cuda-python (module {error.name}), "
            f"which is not installed here; install it"
        ) from None
    try:
        _call(driver, driver.cuInit(0))
        number = _call(driver, driver.cuDeviceGet(ordinal))
        name = _call(driver, driver.cuDeviceGetName(128, number))
        attribute = driver.CUdevice_attribute
        parts = (getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        capability = [_call(driver, driver.cuDeviceGetAttribute(part, number)) for part in parts]
        memory = _call(driver, driver.cuDeviceTotalMem(number))
        cuda = _call(driver, driver.cuDriverGetVersion())
    except RuntimeError as error:  # cuda-bindings raises it where there is no libcuda
        raise InputError(
            f"{where}: expected an NVIDIA GPU with its driver, found none: {' '.join(str(error).split())}"
        ) from None
    return {
        "type": "gpu",
        "name": name.partition(b"\0")[0].decode(),
        "compute_capability": ".".join(map(str, capability)),
        "driver": driver_version(cuda),
        "memory": int(memory),
    }


def driver_version(cuda: int, text: str | None = None) -> str:
    """Return the version of the NVIDIA kernel module (550.54.15), or else of CUDA (`cuda`: 12040 for 12.4)."""
    if text is None:
        text = _DRIVER.read_text(errors="replace") if _DRIVER.exists() else ""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def gpu_key(device: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for an engine to be loaded."""
    return {key: device.get(key) for key in ("name", "compute_capability", "driver")}


def _call(driver: Any, result: tuple) -> Any:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(error).rpartition(".")[2])
    return values[0] if values else None
