"""The libraries beside our own kernels, cuBLAS, cuDNN and NVRTC: found when needed, or refused in a line."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

_CUDNN = "expected the Python package nvidia-cudnn-frontend and the library cuDNN 9, which compute attention"
_CUBLAS = ("libcublasLt.so.12", "libcublasLt.so.13")
_CUBLAS_FOLDERS = ("nvidia/cublas/lib", "nvidia/cu13/lib")


def require_cudnn(instead: str = "") -> Any:
    """Return the module `cudnn`. Raises InputError without it, or cuDNN 9; instead: what one may do then."""
    instead = f", or {instead}" if instead else ""
    try:
        with _without_torch():
            import cudnn
        version = cudnn.backend_version()
    # found without the library, it can be imported; with two of them it asserts
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise InputError(f"{_CUDNN}, found: {_line(error)}; install what is missing{instead}") from None
    if not 90000 <= version < 100000:
        unit = 1000 if version < 90000 else 10000
        found = f"{version // unit}.{version % unit // 100}"
        raise InputError(f"{_CUDNN}, found cuDNN {found}; name the folder of libcudnn.so.9 in LD_LIBRARY_PATH{instead}")
    try:
        cudnn.destroy_handle(cudnn.create_handle())
    except RuntimeError as error:
        raise InputError(
            f"{_CUDNN}, found one that does not start: {_line(error)}; install one for this driver{instead}"
        ) from None
    return cudnn


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Keep cuDNN's module, which takes torch's tensors too, from importing torch: seconds before a model is ready."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` raises ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules["torch"]


def require_capability(device: Mapping[str, Any], instead: str) -> None:
    """Raise InputError for a GPU too old for fused attention's kernels; instead: what one may do with it."""
    found = device["compute_capability"]
    if tuple(map(int, found.split("."))) < (8, 0):
        raise InputError(
            f"expected a GPU of compute capability 8.0 or higher, found {device['name']} of {found}; {instead}"
        )


def require_nvrtc() -> None:
    """Raise InputError where NVRTC, which compiles our own kernels, is not found."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise InputError(
            "expected the package cuda-bindings and the library NVRTC of the CUDA toolkit (nvidia-cuda-nvrtc), which "
            f"compiles the kernels of attention and of the KV cache, found: {_line(error)}; install it for this "
            "Python, or name its folder in LD_LIBRARY_PATH"
        ) from None


def require_cublas() -> Any:
    """Return cuBLASLt, of `site-packages/nvidia` or else what the loader finds. Raises InputError without any."""
    folders = [Path(entry) / folder for entry in sys.path if entry for folder in _CUBLAS_FOLDERS]
    wheels = [str(folder / name) for folder in folders for name in _CUBLAS if (folder / name).is_file()]
    for name in (*wheels, *_CUBLAS):
        try:
            return open_library(name)
        except OSError:
            continue
    raise InputError(
        "expected the library cuBLAS 12 or 13, which multiplies with weights, found none; install nvidia-cublas for "
        "this Python, or name its folder in LD_LIBRARY_PATH"
    )


def library_versions() -> dict[str, str]:
    """Return the versions of cublas, cudnn and nvrtc, of those that are here."""
    found = {}
    with contextlib.suppress(InputError):
        found["cublas"] = _cublas_version(require_cublas())
    # cuDNN has no version before its package, and NVRTC none before its library is found
    with contextlib.suppress(ImportError, OSError, RuntimeError, AssertionError):
        with _without_torch():
            import cudnn
        number = cudnn.backend_version()
        found["cudnn"] = f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from cuda.bindings import nvrtc

        found["nvrtc"] = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    return found


def _cublas_version(library: Any) -> str:
    """Return major, minor and patch (library_types.h: libraryPropertyType)."""
    value = ctypes.c_int()
    parts = []
    for which in range(3):
        if library.cublasLtGetProperty(which, ctypes.byref(value)):
            raise InputError("cuBLAS: expected its version, found none; install another")
        parts.append(str(value.value))
    return ".".join(parts)


def open_library(name: str) -> Any:
    """Open a shared library through ctypes. Raises OSError where there is none of this name."""
    return ctypes.CDLL(name)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
