"""The TensorRT-RTX backend.

Engine: an engine plan whose weights are inputs, the same bytes on every machine.

Nothing is timed when an engine is built: kernels are chosen and compiled where it is loaded. So a build needs no GPU.
An engine cannot be inspected without one, so names, types, sizes and profiles of its network are compared with the
graph before the build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.signature import IO
from lockstep.backends.base import Built, Program
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.backends.profiles import LIMITS
from lockstep.targets import Limits
from lockstep_gpu.backends.gpu_backend import (
    PortableGpuBackend,
    build_host_graph,
    check_state_mixers,
    with_fused_attention,
)
from lockstep_gpu.backends.tensorrt_rtx.compiler import Compiler
from lockstep_gpu.backends.tensorrt_rtx.gpu import why_not
from lockstep_gpu.backends.tensorrt_rtx.library import TENSORRT_RTX

_GRAPH = ".onnx"


class TensorRTRTXBackend(PortableGpuBackend):
    """TensorRT-RTX 1.7 and later; precision is the graph's, quantised weights are dequantised to float32."""

    library = TENSORRT_RTX
    name = "tensorrt_rtx"
    gpus = "NVIDIA RTX GPUs"  # `compute_capabilities` of the options says which
    suffixes = (".engine", _GRAPH)
    revision = 4
    precisions = ("fp32", "fp16", "bf16", "w8a16", "w4a16")
    rank_devices = False

    def __init__(self) -> None:
        self.library.require()
        self._compiler = Compiler()
        self._host = OnnxRuntimeBackend()

    def version(self) -> str:
        return self.library.version_text()

    def libraries(self, runs: bool) -> dict[str, str]:
        """Return the version of NVRTC, whose kernels run besides engines; builds use the library alone."""
        return {name: version for name, version in super().libraries(runs).items() if name == "nvrtc"}

    def default_options(self) -> dict[str, Any]:
        """Return the build options as they are recorded; compute_capabilities: None is portable."""
        return {"compute_capabilities": None, **{name: getattr(Limits(), name) for name in LIMITS}}

    def graphs(self, assembly: Assembly, options: Mapping[str, Any]) -> Iterator[tuple[str, GraphFile]]:
        """Yield the engine names and graphs of an assembly: see `Backend.graphs`. Attention is traced."""
        check_state_mixers(assembly, f"backend {self.name}")
        return with_fused_attention(assembly, ())

    def finish(self, names: Sequence[str]) -> dict[str, Any]:
        self._compiler.end()
        return {"typing": "strong", "attention": "traced"}

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        """Build an engine in a child process: see `compiler`."""
        if out_path.suffix == _GRAPH:
            build_host_graph(graph_path, out_path, options["max_seq_len"])
            return Built()
        self._compiler.build(graph_path, out_path, options)
        return Built()

    def load(
        self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0
    ) -> Program:
        """Load an engine file. Raises InputError where no GPU here runs the engine."""
        if engine_path.suffix == _GRAPH:
            return self._host.load(engine_path, slots, None, low_memory)
        self.require_gpu()
        from lockstep_gpu.backends.tensorrt.program import TensorRTProgram

        return TensorRTProgram(self.library, engine_path, slots)

    def why_not(self) -> str | None:
        return why_not(None)


BACKEND = TensorRTRTXBackend
