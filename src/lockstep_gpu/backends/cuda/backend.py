"""The CUDA backend: kernels generated from a block's graph, products by cuBLAS, on NVIDIA GPUs, one a rank.

Engine: text of a few kilobytes, without weights, the same bytes on every machine; a build needs no GPU. Attention is
fused (`lockstep_gpu.attention`): of a variant only its RoPE is needed, whose graph is next to the engines and runs on
the host. An operator without a kernel is an error: there is no fallback.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.dtypes import has_8_bit_activations
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import write_bytes
from lockstep.artifacts.signature import IO
from lockstep.backends.base import Built, Program
from lockstep.backends.graphs import base_graphs
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.backends.profiles import LIMITS
from lockstep.errors import InputError
from lockstep.step.activations import with_activations
from lockstep.targets import Limits
from lockstep_gpu.attention.variants import why_not_fused
from lockstep_gpu.backends.cuda.gpu import MODEL_SETTINGS, PRECISIONS, why_not
from lockstep_gpu.backends.gpu_backend import GpuBackend, build_host_graph, check_state_mixers, with_fused_attention
from lockstep_gpu.describe import describe_gpu
from lockstep_gpu.libraries import require_cublas, require_cudnn, require_nvrtc

_KERNELS = ".kernels"
_GRAPH = ".onnx"
REVISION = 3  # of the kernels and of what runs them: engines are for exactly this one


class CudaBackend(GpuBackend):
    """Kernels of our own and cuBLAS: activations in floating point, quantised weights, which products dequantise."""

    name = "cuda"
    portable = True
    suffixes = (_KERNELS, _GRAPH)
    revision = REVISION
    precisions = PRECISIONS
    activations = "float16"
    takes_canonical = True
    model_settings = MODEL_SETTINGS

    def __init__(self) -> None:
        self._host = OnnxRuntimeBackend()
        self._is_required = False  # see `require`
        self._is_fp32 = False  # the set that is being built: a float32 graph may also be of quantised weights

    def version(self) -> str:
        return str(REVISION)

    def is_batch_invariant(self, assembly: Assembly) -> bool:
        """Return whether products have one order for any batch: fp16's with quantised weights have two, fp8's three."""
        if has_8_bit_activations(assembly.precision):
            return False
        return assembly.quantization is None or assembly.activations is not None

    def describe_device(self) -> dict[str, Any]:
        """Return what engines are for: no one device."""
        return {"type": "gpu", "name": "NVIDIA GPUs of compute capability 8.0 and higher"}

    def describe_hardware(self) -> dict[str, Any]:
        """Return the description of the GPU here, which runs engines."""
        return describe_gpu(f"backend {self.name}")

    def device_key(self, device: Mapping[str, Any]) -> Any:
        return {"name": device.get("name")}

    def default_options(self) -> dict[str, Any]:
        """Return the build options as they are recorded: the limits that engines are opened with."""
        return {name: getattr(Limits(), name) for name in LIMITS}

    def graphs(self, assembly: Assembly, options: Mapping[str, Any]) -> Iterator[tuple[str, GraphFile]]:
        """Yield the engine names and graphs of an assembly: see `Backend.graphs`.

        Blocks that take adapters are built twice: with them and without. Raises InputError for an attention variant
        that fused attention does not run, and for adapters in fp32 or of quantised weights.
        """
        if assembly.adapters is not None and assembly.dtype == "float32":
            raise InputError(
                f"backend cuda: expected no adapters in {assembly.precision}, found room for "
                f"{assembly.adapters.max_adapters}; export without, or in fp16 or bf16"
            )
        if assembly.residual is not None and assembly.tensor_parallel is not None:
            raise InputError(
                f"backend cuda: residual: expected none for a model split over ranks, found {assembly.residual}; "
                "use one GPU, or the backend tensorrt"
            )
        run = with_activations(assembly, self.activations)
        if assembly.kv_cache_dtype is not None and run.dtype != "float16":
            raise InputError(
                f"backend cuda: kv_cache_dtype: expected none in {run.dtype}, found {assembly.kv_cache_dtype}; take "
                "fp16"
            )
        for name, variant in run.variants.items():
            if reason := why_not_fused(variant, run.dtype):
                raise InputError(
                    f"backend cuda: {name}: expected attention that its kernels run, found {reason}; use the backend "
                    "tensorrt"
                )
        check_state_mixers(run, "backend cuda")
        yield from with_fused_attention(assembly, assembly.variants)
        yield from base_graphs(assembly)

    def start(self, folder: Path, manifest: EngineSetManifest, names: Sequence[str]) -> None:
        self._is_fp32 = manifest.precision == "fp32"

    def finish(self, names: Sequence[str]) -> dict[str, Any]:
        return {"attention": "fused"}

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        if out_path.suffix == _GRAPH:
            build_host_graph(graph_path, out_path, options["max_seq_len"])
        else:
            from lockstep_gpu.backends.cuda.compiler import (
                compile_block,  # the toolkit is needed only where it compiles
            )

            write_bytes(out_path, compile_block(onnx.load(graph_path), self._is_fp32).to_bytes())
        return Built()

    def load(
        self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0
    ) -> Program:
        """Load an engine file. Raises InputError where there is no GPU for it, or a library is missing."""
        if engine_path.suffix == _GRAPH:
            return self._host.load(engine_path, slots, None, low_memory)
        self.require()
        from lockstep_gpu.backends.cuda.program import KernelsProgram

        return KernelsProgram(engine_path, slots, rank)

    def require(self) -> None:
        """Raise InputError where engines cannot run here, or a library is missing; checked once."""
        if not self._is_required:
            if reason := why_not():
                raise InputError(f"backend {self.name}: {reason}; its engines can be built here, not run")
            for require in (require_nvrtc, require_cublas, require_cudnn):
                require()
            self._is_required = True


BACKEND = CudaBackend
