"""The base of backends whose engines run on NVIDIA GPUs, by `lockstep_gpu`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.files import write_bytes
from lockstep.backends.base import Backend
from lockstep.backends.graphs import RopeGraph, StateGraph
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.step.advance import Executor
from lockstep.step.network import Network
from lockstep_gpu.attention.rope_tables import check_rope_tables
from lockstep_gpu.libraries import library_versions, require_nvrtc
from lockstep_gpu.state_kernels import StateKernelSpec, check_state_graph


class GpuBackend(Backend):
    """A backend whose engines run on a GPU, one device a rank."""

    batch_invariant = False
    on_host = False
    rank_devices = True

    def libraries(self, runs: bool) -> dict[str, str]:
        """Return the versions of cuBLAS, cuDNN and NVRTC, which run besides engines, or instead of them."""
        return library_versions() if runs else {}

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        from lockstep_gpu import cuda

        return cuda.empty(shape, dtype)

    def executor(
        self,
        networks: Sequence[Network],
        rows: int,
        max_seq_len: int,
        max_num_tokens: int | None,
        kv_bytes: float | None,
    ) -> Executor:
        assert max_num_tokens is not None  # it is among the options of these backends
        require_nvrtc()
        from lockstep_gpu.executor import GpuExecutor

        return GpuExecutor(networks, rows, max_seq_len, max_num_tokens, kv_bytes)


def check_state_mixers(assembly: Assembly, where: str) -> None:
    """Raise InputError, which begins with `where`, for a mixer with a state that has no kernel."""
    for name, mixer in assembly.state_mixers.items():
        StateKernelSpec.of(mixer, f"{where}: {name}")


def with_fused_attention(assembly: Assembly, fused: Collection[str]) -> Iterator[tuple[str, GraphFile]]:
    """Yield the engine names and graphs of an assembly.

    Attention variants in `fused` need only their RoPE. For mixers with a state, `<mixer>.state` is the graph that
    defines their kernel.
    """
    variants = assembly.variants
    if assembly.tensor_parallel is not None:
        variants = assembly.tensor_parallel.variants
    for name, graph in assembly.engine_graphs():
        variant, _, phase = name.rpartition(".")
        if variant in assembly.state_mixers:
            if phase == "decode":
                yield f"{variant}.state", StateGraph(graph.file, graph.sha256, graph.signature)
        elif variant not in fused:
            yield name, graph
        elif phase == "decode":
            yield f"{variant}.rotary", RopeGraph(graph.file, graph.sha256, graph.signature, variants[variant])


def build_host_graph(graph_path: Path, out_path: Path, max_seq_len: int) -> None:
    """Copy the graph that defines a kernel of the GPU runtime: of a state mixer, or of RoPE.

    Raises CheckError where the kernel's results differ.
    """
    if out_path.stem.endswith(".state"):
        check_state_graph(onnx.load(graph_path), str(out_path))
    else:
        rope = OnnxRuntimeBackend().load(graph_path, (), None, False).bind(None, {})
        check_rope_tables(rope, max_seq_len, str(out_path))
    write_bytes(out_path, graph_path.read_bytes())
