"""Describe a GPU by what engines depend on (name, compute capability, driver). Importing this needs no CUDA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

_DRIVER = Path("/proc/driver/nvidia/version")


def describe_gpu(where: str, ordinal: int = 0) -> dict[str, Any]:
    """Return a CUDA device as {"type", "name", "compute_capability", "driver", "memory"}, memory in bytes.

    where: prefix of error messages, such as `backend cuda`. Raises InputError without a CUDA driver or a GPU.
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
        major_attribute = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        minor_attribute = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        major = _call(driver, driver.cuDeviceGetAttribute(major_attribute, number))
        minor = _call(driver, driver.cuDeviceGetAttribute(minor_attribute, number))
        memory = _call(driver, driver.cuDeviceTotalMem(number))
        cuda = _call(driver, driver.cuDriverGetVersion())
    except RuntimeError as error:  # cuda-bindings raises it where there is no libcuda
        raise InputError(
            f"{where}: expected an NVIDIA GPU with its driver, found none: {' '.join(str(error).split())}"
        ) from None
    return {
        "type": "gpu",
        "name": name.partition(b"\0")[0].decode(),
        "compute_capability": f"{major}.{minor}",
        "driver": driver_version(cuda),
        "memory": int(memory),
    }


def driver_version(cuda: int, text: str | None = None) -> str:
    """Return the version of the NVIDIA kernel module (550.54.15), else "CUDA 12.4" for `cuda` 12040."""
    if text is None:
        text = _DRIVER.read_text(errors="replace") if _DRIVER.exists() else ""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def gpu_key(device: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that must match for an engine to load on this device."""
    return {key: device.get(key) for key in ("name", "compute_capability", "driver")}


def _call(driver: Any, result: tuple) -> Any:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(error).rpartition(".")[2])
    return values[0] if values else None
