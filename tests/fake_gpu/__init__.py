"""A fake GPU: CUDA, TensorRT and cuDNN on a machine without a GPU, on which all of this project's code runs as it is.

`installed` puts it in place; tests take it by the fixture `gpu`.

What is imitated, strictly:

- Memory (`device`). Addresses lie outside of host memory, each access is held against the allocations, new and freed
  memory is full of NaN, and no address is given out twice. Page-locked host memory is read when a copy runs, other host
  memory when the copy is asked for.
- Streams (`device`). They do nothing until the host waits for just them, so that whatever relies on an order which
  nothing holds is wrong. A captured graph replays the addresses that it was captured with, and asks that its contexts
  still live and have the shapes of then.
- TensorRT (`tensorrt`), by its name or another's, such as `tensorrt_rtx`, of which it has the runtime cache, and the
  compute capability 8.9 (`CAPABILITY`). An engine plan is the ONNX graph that the
  builder asked for (lowered, fused), run by ONNX Runtime. As 8.6 does, integers are int32, later int64; shapes outside
  of the profile that is set are refused.
- Several devices (`device`), where a test asks for them: kernels and engines run where they were loaded.
- Kernels (`kernels`) and cuDNN's attention over pages (`cudnn`), in NumPy. What cuDNN spoils is NaN.

What is not: TensorRT's builder, inspector and timing cache (`TensorRTBackend.build` is replaced), the precision of its
kernels, whether NVRTC compiles a source, and speed. (`host_block.h` runs the source of a kernel, compiled for the host,
apart from this GPU.)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import onnx

from fake_gpu import cublas, cuda, cudnn, tensorrt
from fake_gpu.device import Fault, Gpu
from lockstep.backends.tensorrt.v8_6 import needs
from lockstep.backends.tensorrt_rtx import gpu as rtx_gpu

__all__ = ["Fault", "Gpu", "installed"]

CAPABILITY = "8.9"  # as TensorRT-RTX asks the driver; what only TensorRT reads says 9.8

# Modules of a backend that cannot be imported without CUDA: bound to the fake one for as long as it is installed.
BOUND = (
    "cuda",
    "kernels",
    "fused_spec",
    "paged_decode_attention",
    "rope_kernel",
    "rank_device",
    "device_weights",
    "program",
    "cublas",
    "products",
    "cut_program",
    "attention",
    "fused_attention",
    "staging",
    "decode_state",
    "prompts",
    "prompt_attention",
    "prompt_blocks",
    "all_reduce",
    "rank",
    "resident_adapters",
    "rank_group",
    "timing",
    "executor",
    "comparison",
)

# What a `Library` keeps of the module that it has loaded.
OWN = ("api", "_logger", "_runtime", "_caches")


@contextlib.contextmanager
def installed(version: str = "8.6.0", name: str = "tensorrt") -> Iterator[Gpu]:
    """Put the fake GPU in place of what the machine has, or has not, until the end of the `with`.

    Args:
        version: of the library.
        name: of the backend: `tensorrt` or `tensorrt_rtx`.
    """
    backend = importlib.import_module(f"lockstep.backends.{name}.backend").BACKEND
    gpu, bindings, outer = Gpu(), ModuleType("cuda.bindings"), ModuleType("cuda")
    parts = {"runtime": cuda.runtime(gpu), "nvrtc": cuda.nvrtc(), "driver": cuda.driver(gpu)}
    vars(bindings).update(parts)
    outer.bindings = bindings
    module = backend.library.module
    trt = tensorrt.tensorrt(gpu, version, module)
    modules = {"cuda": outer, "cuda.bindings": bindings, "cudnn": cudnn.cudnn(gpu), module: trt}
    modules |= {f"cuda.bindings.{name}": part for name, part in parts.items()}
    bound = [f"lockstep.backends.{package}.{name}" for package in {"tensorrt", name} for name in BOUND]
    before = {name: _remove(name) for name in (*modules, *bound)}
    library, build = backend.library, backend.build
    old = dict(vars(library))
    sys.modules.update(modules)
    vars(library).update(api=trt, _logger=None, _runtime=None)
    if name == "tensorrt_rtx":
        vars(library).update(_caches={})
    capability = rtx_gpu.compute_capability
    rtx_gpu.compute_capability = lambda: CAPABILITY
    backend.build = lambda self, graph, out, options: _build(self, build, graph, out, options)
    open_library, fake_cublas = needs.open_library, cublas.cublas(gpu)
    needs.open_library = lambda name: fake_cublas
    _reload_in_polygraphy()
    try:
        yield gpu
    finally:
        backend.build, rtx_gpu.compute_capability, needs.open_library = build, capability, open_library
        for key in {*vars(library)} - {*old}:
            if key in OWN:
                del vars(library)[key]
        vars(library).update({key: value for key, value in old.items() if key in OWN})
        for name, held in before.items():
            _remove(name)
            if held is not None:
                _restore(name, held)
        _reload_in_polygraphy()


def _remove(name: str) -> ModuleType | None:
    """Take a module out of `sys.modules` and out of its package; gives it, None where it was not imported."""
    package, _, own = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(own, None)
    return sys.modules.pop(name, None)


def _restore(name: str, held: ModuleType) -> None:
    package, _, own = name.rpartition(".")
    sys.modules[name] = held
    if package in sys.modules:
        setattr(sys.modules[package], own, held)


def _reload_in_polygraphy() -> None:
    """Let Polygraphy's lazy imports of TensorRT, which keep what they found, look again."""
    for module in [module for path, module in sys.modules.items() if path.startswith("polygraphy.")]:
        lazy = vars(module).get("trt")
        if type(lazy).__name__ == "LazyModule":
            object.__setattr__(lazy, "module", None)


def _build(backend: object, real: Callable, graph: Path, out: Path, options: dict):
    """What TensorRTBackend.build does, without TensorRT's builder: the plan is the graph, with the limits of its
    profiles. A build again, in a folder `again`, chooses another tactic for one layer of `middle`."""
    from lockstep.artifacts.files import sha256_file, write_bytes
    from lockstep.backends.base import Built
    from lockstep.backends.profiles import LIMITS, built_limits
    from lockstep.backends.tensorrt.cut_engine import pack
    from lockstep.backends.tensorrt.layers import ChosenLayer
    from lockstep.backends.tensorrt.row_kernels import RowKernel
    from lockstep.onnx_tools.dequantized import dequantize_products

    if out.suffix != ".engine":
        return real(backend, graph, out, options)
    model = onnx.load(graph)
    limits = json.dumps({name: options[name] for name in LIMITS})
    cut = backend.pieces(model, options) if hasattr(backend, "_tactics") else None
    dequantize_products(model, str(out)) if cut is None else None
    plans = []
    for plan in [model] if cut is None else cut.pieces:
        if isinstance(plan, RowKernel):
            plans.append(plan)
            continue
        plan.metadata_props.add(key="limits", value=limits)
        plans.append(plan.SerializeToString())
    write_bytes(out, plans[0] if cut is None else pack(model, cut.graph, plans, built_limits(options)))
    if not hasattr(backend, "_tactics"):  # TensorRT-RTX chooses none
        return Built()
    tactic = "another" if out.parent.name == "again" and out.stem == "middle" else "one"
    product = ChosenLayer("product", (), "gemm", tactic)
    digest = backend._tactics.take(out.stem, sha256_file(graph), [product], str(out))
    backend._tactics.take_cache(b"cache", {}, str(out))
    return Built({"tactics_sha256": digest})
