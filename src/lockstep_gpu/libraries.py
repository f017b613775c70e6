"""Load cuBLAS, cuDNN and NVRTC when they are needed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.errors import InputError

_CUDNN = "expected the Python package nvidia-cudnn-frontend and the library cuDNN 9, which compute attention"


def require_cudnn(instead: str = "") -> Any:
    """Return the module `cudnn`. Raises InputError if it or cuDNN 9 is missing; instead: advice for that error."""
    instead = f", or {instead}" if instead else ""
    try:
        with _without_torch():
            import cudnn
        version = cudnn.backend_version()
    # The package imports without the library and fails at the first call; with two copies of it, it asserts.
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise InputError(f"{_CUDNN}, found: {_line(error)}; install what is missing{instead}") from None
    if not 90000 <= version < 100000:
        # cuDNN 8 encodes 8.9.2 as 8902; cuDNN 9 encodes 9.1.0 as 90100.
        unit = 1000 if version < 90000 else 10000
        name = f"{version // unit}.{version % unit // 100}"
        raise InputError(f"{_CUDNN}, found cuDNN {name}; name the folder of libcudnn.so.9 in LD_LIBRARY_PATH{instead}")
    try:
        cudnn.destroy_handle(cudnn.create_handle())
    except RuntimeError as error:
        raise InputError(
            f"{_CUDNN}, found one that does not start: {_line(error)}; install one for this driver{instead}"
        ) from None
    return cudnn


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Stop the module `cudnn`, which also accepts torch tensors, from importing torch: that would take seconds."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` raises ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules["torch"]


def require_capability(device: Mapping[str, Any], instead: str) -> None:
    """Raise InputError if a GPU is too old for fused attention; instead: advice for that error."""
    capability = device["compute_capability"]
    if tuple(map(int, capability.split("."))) < (8, 0):
        raise InputError(
            f"expected a GPU of compute capability 8.0 or higher, found {device['name']} of {capability}; {instead}"
        )


def require_nvrtc() -> None:
    """Raise InputError if NVRTC, which compiles our kernels, is missing."""
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
    """Return `nvmath.bindings.cublasLt`. Raises InputError if it or cuBLAS is missing."""
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()
    except (ImportError, RuntimeError) as error:
        raise InputError(
            "expected the package nvmath-python and the library cuBLAS 12 or 13, which multiplies with weights, found: "
            f"{_line(error)}; install nvmath-python and nvidia-cublas for this Python"
        ) from None
    return cublasLt


def library_versions() -> dict[str, str]:
    """Return the versions of cublas, cudnn and nvrtc; libraries that are missing are left out."""
    versions = {}
    with contextlib.suppress(InputError):
        cublas = require_cublas()
        versions["cublas"] = ".".join(str(cublas.get_property(level)) for level in range(3))  # libraryPropertyType
    with contextlib.suppress(ImportError, OSError, RuntimeError, AssertionError):
        with _without_torch():
            import cudnn
        number = cudnn.backend_version()
        versions["cudnn"] = f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from cuda.bindings import nvrtc

        versions["nvrtc"] = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    return versions


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
