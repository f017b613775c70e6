"""TensorRT-RTX with TensorRT's interface; kernels are compiled, and cached, where an engine is loaded."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.files import sha256_json, write_bytes
from lockstep.errors import CheckError, InputError
from lockstep_gpu.backends.tensorrt.compat import Library
from lockstep_gpu.describe import describe_gpu, gpu_key

if TYPE_CHECKING:
    import tensorrt_rtx_bindings as trt


class RTXLibrary(Library):
    """TensorRT-RTX 1.7 and later of 1.x."""

    name = "TensorRT-RTX"
    backend = "tensorrt_rtx"
    module = "tensorrt_rtx_bindings"  # tensorrt_rtx, of the same distribution, imports all of it
    supported = "TensorRT-RTX 1.7 or a later 1.x"
    remedy = "install it: docs/tensorrt_rtx.md says how"
    needs_gpu_to_build = False

    def __init__(self) -> None:
        super().__init__()
        self.caches: dict[Path, Any] = {}

    @property
    def package(self) -> str:
        return "tensorrt-rtx"

    def is_supported(self) -> bool:
        return (1, 7) <= self.version() < (2, 0)

    def set_compute_capabilities(self, config: trt.IBuilderConfig, capabilities: Sequence[str] | None) -> None:
        """Build for these ("8.9"); None: the library's own choice, a portable engine."""
        if capabilities is None:
            return
        members = self.api.ComputeCapability.__members__
        config.num_compute_capabilities = len(capabilities)
        for number, capability in enumerate(capabilities):
            self.log.clear()
            which = members.get(f"SM{capability.replace('.', '')}")
            if which is None or not config.set_compute_capability(which, number):
                raise CheckError(f"{self.title} does not build for compute capability {capability}")

    def use_one_thread(self, builder: trt.Builder) -> None:
        """Let the builder use one thread: more would allocate in another order each time."""
        builder.max_threads = 1

    def create_context(self, engine: trt.ICudaEngine, where: str, fixed_shapes: bool) -> trt.IExecutionContext:
        """Return a context as of TensorRT, with kernels from the runtime cache.

        The cache keeps kernels that are compiled now. A context with fixed shapes is captured in a CUDA graph: its
        kernels are compiled for these shapes before it runs. For other contexts they are compiled in the background,
        and a general kernel runs until then.
        """
        self.log.clear()
        config: trt.IRuntimeConfig = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self.api.ExecutionContextAllocationStrategy.USER_MANAGED)
        strategies = self.api.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if fixed_shapes else strategies.LAZY
        config.set_runtime_cache(self._runtime_cache(config, Path(where).parent))
        context: trt.IExecutionContext | None = engine.create_execution_context(config)
        if context is None:
            raise CheckError(f"{where}: {self.title} cannot make an execution context: {self.log.first_error()}")
        return context

    def _runtime_cache(self, config: trt.IRuntimeConfig, folder: Path) -> trt.IRuntimeCache:
        """Return a folder's cache of kernels for this GPU, driver and version; an empty one if TensorRT rejects it."""
        gpu = gpu_key(describe_gpu(f"backend {self.backend}"))
        path = folder / f"runtime.{sha256_json([self.version_text(), gpu])[:12]}.cache"
        if path not in self.caches:
            cache: trt.IRuntimeCache = config.create_runtime_cache()
            before = b""
            if path.is_file():
                before = path.read_bytes()
            if before and not cache.deserialize(before):
                before = b""
            self.caches[path] = cache
            atexit.register(_save, path, cache, before)
        return self.caches[path]


def _save(path: Path, cache: Any, before: bytes) -> None:
    """Write a runtime cache at the end of the process; ignore a folder that is not writable."""
    data = bytes(cache.serialize())
    if data != before and path.parent.is_dir():
        with contextlib.suppress(OSError, InputError):
            write_bytes(path, data)


TENSORRT_RTX = RTXLibrary()
