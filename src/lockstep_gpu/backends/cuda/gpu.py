"""Whether engines of the `cuda` backend run here, by the CUDA driver alone: no library is loaded."""

from __future__ import annotations

from lockstep.errors import is_installed, pip_install
from lockstep_gpu.compute_capability import compute_capability

PRECISIONS = ("fp32", "fp16", "bf16", "w8a16", "w4a16", "w8a8-fp8")
MODEL_SETTINGS = ("activations", "kv_cache_dtype")
_PACKAGES = {"cuda.bindings": "cuda-bindings", "cudnn": "nvidia-cudnn-frontend", "nvmath": "nvmath-python"}


def why_not() -> str | None:
    """Return why engines cannot run here, None where they can."""
    capability = compute_capability()
    needed = "needs an NVIDIA GPU of compute capability 8.0 or higher, found"
    if capability is None:
        return f"{needed} none"
    if int(capability.partition(".")[0]) < 8:
        return f"{needed} one of {capability}"
    missing = [package for module, package in _PACKAGES.items() if not is_installed(module)]
    if missing:
        return f"needs {', '.join(missing)} in this Python, found none: {pip_install('cuda')}"
    return None
