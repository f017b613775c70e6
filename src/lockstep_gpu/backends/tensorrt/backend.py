"""The TensorRT backend on NVIDIA GPUs, one a rank.

Engine: an engine plan whose weights are inputs, less than a megabyte. The RoPE of an attention variant with fused
attention is no engine plan: it is read from its graph (rope_tables.py), a file next to the engine plans, and runs on
the host.

One builder and one timing cache serve all graphs that an instance builds: layers that two graphs share are timed once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.files import sha256_file, write_bytes
from lockstep.artifacts.signature import IO
from lockstep.backends.base import Built, Program
from lockstep.backends.graphs import base_graphs, with_rows
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.backends.profiles import LIMITS, built_limits, profiles
from lockstep.errors import CheckError, InputError
from lockstep.targets import Limits
from lockstep_gpu.attention.variants import why_not_fused
from lockstep_gpu.backends.gpu_backend import GpuBackend, build_host_graph, check_state_mixers, with_fused_attention
from lockstep_gpu.backends.tensorrt.compat import TENSORRT
from lockstep_gpu.backends.tensorrt.contract import check_contract, tensor_types
from lockstep_gpu.backends.tensorrt.layers import Layer, check_precision, fingerprint, fp16_sums, read_layers
from lockstep_gpu.backends.tensorrt.memory import PeakMemory
from lockstep_gpu.backends.tensorrt.tactics import CACHE, Tactics
from lockstep_gpu.describe import describe_gpu, gpu_key
from lockstep_gpu.libraries import require_capability, require_cudnn, require_nvrtc

# Optimization levels by the name of the graph. Attention takes 50 s at level 3 for the smallest model, and had not
# ended after two minutes at level 5.
_HIGHEST_LEVEL = {"decode": 3, "prefill": 3}
_PLAN = ".engine"
_GRAPH = ".onnx"
_COMPILER_FLAGS = "__LUNOWUD"  # an undocumented variable: flags of TensorRT's compiler, which change numbers
_ATTENTIONS = ("fused", "traced")
_INSTEAD = "build with attention: traced"


class TensorRTBackend(GpuBackend):
    """TensorRT 10.3 to 11.x; precision is the graph's: no TF32, float32 in fp16 graphs stays float32."""

    name = "tensorrt"
    polygraphy = "--trt --strongly-typed"
    suffixes = (_PLAN, _GRAPH)
    revision = 15
    precisions = ("fp32", "fp16", "bf16")
    takes_long = True

    def __init__(self) -> None:
        TENSORRT.require()
        self._builder: Any = None
        self._timing: Any = None
        self.tactics: Tactics | None = None
        self._host = OnnxRuntimeBackend()

    def version(self) -> str:
        return TENSORRT.version_text()

    def describe_device(self) -> dict[str, Any]:
        return describe_gpu(f"backend {self.name}")

    def device_key(self, device: Mapping[str, Any]) -> Any:
        return gpu_key(device)

    def default_options(self) -> dict[str, Any]:
        """Return the build options as they are recorded.

        Limits: of the optimization profiles. compiler_flags: only if the user has set some.
        """
        flags = " ".join(os.environ.get(_COMPILER_FLAGS, "").split())
        options: dict[str, Any] = {
            "fuse_projections": True,
            "workspace_mb": 4096,
            "optimization_level": 4,
            "tactics": "free",
            "attention": "fused",
            **{name: getattr(Limits(), name) for name in LIMITS},
        }
        if flags:
            options["compiler_flags"] = flags
        return options

    def options_key(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options without the mode of tactics: `keeps` compares engines with the record."""
        return {key: value for key, value in options.items() if key != "tactics"}

    def graphs(self, assembly: Assembly, options: Mapping[str, Any]) -> Iterator[tuple[str, GraphFile]]:
        """Yield the engine names and graphs of an assembly: see `Backend.graphs`.

        Of attention variants that fused attention can run, only RoPE is needed. Blocks that take adapters are built
        twice: with the adapters' first products as rows of weights, and without adapter inputs. Raises InputError for
        unknown values of options.
        """
        if options.get("attention") not in _ATTENTIONS:
            raise InputError(f"attention: expected one of {', '.join(_ATTENTIONS)}, found {options.get('attention')!r}")
        check_state_mixers(assembly, "backend tensorrt")
        fused = set[str]()
        if options["attention"] == "fused" and assembly.dtype != "float32":
            fused |= {name for name, variant in assembly.variants.items() if not why_not_fused(variant, assembly.dtype)}
        for name, graph in with_fused_attention(assembly, fused):
            yield name, with_rows(assembly, name, graph)
        yield from base_graphs(assembly)

    def start(self, folder: Path, manifest: EngineSetManifest, names: Sequence[str]) -> None:
        if any(name.endswith(".rotary") for name in names):
            require_capability(manifest.device, _INSTEAD)
            require_cudnn(_INSTEAD)
        require_nvrtc()
        device = self.device_key(manifest.device)
        options = self.options_key(manifest.options)
        made_by = {"version": manifest.backend_version, "device": device, "options": options, "revision": self.revision}
        self.tactics = Tactics(manifest.options["tactics"], folder, made_by)

    def keeps(self, name: str, entry: EngineFile) -> bool:
        return self.file(name).endswith(_GRAPH) or self._started().keeps(name, entry.details["tactics_sha256"])

    def _started(self) -> Tactics:
        assert self.tactics is not None, "expected `start` before `keeps` and `finish`"
        return self.tactics

    def finish(self, names: Sequence[str]) -> dict[str, Any]:
        return {"tactics": self._started().finish([name for name in names if self.file(name).endswith(_PLAN)])}

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        if out_path.suffix == _GRAPH:
            build_host_graph(graph_path, out_path, options["max_seq_len"])
            return Built()
        where = str(out_path)
        name = out_path.stem
        model = onnx.load(graph_path)
        tactics = self.tactics or Tactics("free", out_path.parent, {})
        level = min(options["optimization_level"], _HIGHEST_LEVEL.get(model.graph.name, 5))
        with PeakMemory() as peak:
            config, plan, layers = self._engine(model, level, options, tactics, where)
        digest = tactics.take(name, sha256_file(graph_path), fingerprint(layers), where)
        cache = TENSORRT.serialize_timing_cache(config)
        tactics.take_cache(cache, TENSORRT.cached_tactics(config), where)
        write_bytes(out_path, plan)
        about: dict[str, Any] = {"tactics_sha256": digest}
        note = None
        if sums := fp16_sums(layers):
            about["fp16_sums"] = sums
            note = f"products that TensorRT accumulates in fp16: {', '.join(sums)}"
        return Built(about, peak.nbytes, note)

    def _engine(
        self, model: onnx.ModelProto, level: int, options: Mapping[str, Any], tactics: Tactics, where: str
    ) -> tuple[Any, bytes, list[Layer]]:
        """Return configuration (with the timing cache), plan and layers of an engine that agrees with its graph."""
        # The toolkit is needed only where engines are built.
        from lockstep.onnx_tools.toolkit import run_passes
        from lockstep_gpu.backends.tensorrt.fp32_sums import Fp32Sums

        if self._builder is None:
            self._builder = TENSORRT.create_builder()
        types = tensor_types(model)
        bounds = profiles(model, built_limits(options))
        network = TENSORRT.create_network(self._builder)
        parsed = run_passes(model, Fp32Sums()).SerializeToString()
        parser = TENSORRT.parse(network, parsed, where)  # noqa: F841  it owns what the network reads
        config = TENSORRT.create_config(self._builder, options["workspace_mb"] << 20, level)
        for profile in bounds:
            TENSORRT.add_profile(self._builder, config, profile)
        if self._timing is None:
            self._timing = TENSORRT.create_timing_cache(config, tactics.cache)
        if self._timing is None or not TENSORRT.use_timing_cache(config, self._timing, tactics.mode == "verified"):
            raise CheckError(
                f"{where}: TensorRT {self.version()} refuses the timing cache: "
                f"{TENSORRT.log.first_error()}; delete {CACHE} and build again"
            )
        plan = TENSORRT.build_plan(self._builder, network, config, where)
        engine = TENSORRT.deserialize(plan, where)
        layers = read_layers(TENSORRT.layer_information(engine), where)
        check_contract(TENSORRT.tensors(engine), model, bounds, where)
        check_precision(layers, model, types, where)
        return config, plan, layers

    def load(
        self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0
    ) -> Program:
        if engine_path.suffix == _GRAPH:
            return self._host.load(engine_path, slots, None, low_memory)
        from lockstep_gpu.backends.tensorrt.program import TensorRTProgram

        return TensorRTProgram(engine_path, slots, rank)


BACKEND = TensorRTBackend
