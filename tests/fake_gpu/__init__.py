"""A fake GPU: CUDA, TensorRT, cuBLAS and cuDNN on a machine without one, on which all of our code runs as it is.

`installed` puts it in place; tests take it by the fixture `gpu`.

Imitated, strictly:

- Memory (`device`). Addresses lie outside of host memory, each access is held against the allocations, new and freed
  memory is full of NaN, and no address is given out twice. Page-locked host memory is read when a copy runs, other host
  memory when the copy is requested.
- Streams (`device`). They do nothing until the host waits for just them, so that whatever relies on an order which
  nothing holds is wrong. A captured graph replays the addresses that it was captured with, and asks that its contexts
  still live and have the shapes of then.
- TensorRT (`tensorrt`). An engine plan is the ONNX graph that the builder asked for (fused), run by ONNX Runtime.
  Shapes outside of the profile that is set are refused.
- Several devices (`device`), where a test asks for them: kernels and engines run where they were loaded.
- Kernels (`kernels`) and cuDNN's attention over pages (`cudnn`), in NumPy. What cuDNN spoils is NaN.

Not imitated: TensorRT's builder, inspector and timing cache (`TensorRTBackend.build` is replaced), the precision of its
kernels, whether NVRTC compiles a source, and speed. (`host_block.h` runs the source of a kernel, compiled for the host,
apart from this GPU.)
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import onnx

import lockstep_gpu.compute_capability as driver
from fake_gpu import cublas_lt, cuda, cudnn, tensorrt
from fake_gpu.device import Fault, Gpu
from lockstep.provenance.code_identity import SOURCES
from lockstep_gpu import kernel_cache
from lockstep_gpu.backends.tensorrt.compat import TENSORRT

__all__ = ["Fault", "Gpu", "installed"]

CAPABILITY = "8.9"  # as the driver says; what only TensorRT reads says 9.8

# Speed is not imitated: algorithms of cuBLAS are timed with a few sizes, on one weight. Each is a product in NumPy.
TRIALS = {"CUBLAS_ROWS": (32, 64, 128, 256, 384), "_MAX_WEIGHTS": 1}


@contextlib.contextmanager
def installed(version: str = "10.6.0", name: str = "tensorrt") -> Iterator[Gpu]:
    """Put the fake GPU in place of what the machine has, or has not, until the end of the `with`.

    Args:
        version: of TensorRT's library.
        name: of the backend: `tensorrt` or `cuda`.
    """
    gpu = Gpu()
    bindings = ModuleType("cuda.bindings")
    outer = ModuleType("cuda")
    parts = {"runtime": cuda.runtime(gpu), "nvrtc": cuda.nvrtc(), "driver": cuda.driver(gpu)}
    vars(bindings).update(parts)
    outer.bindings = bindings
    modules = {"cuda": outer, "cuda.bindings": bindings, "cudnn": cudnn.cudnn(gpu)}
    modules |= {f"cuda.bindings.{name}": part for name, part in parts.items()}
    nvmath = ModuleType("nvmath")
    nvmath.bindings = ModuleType("nvmath.bindings")
    nvmath.bindings.cublasLt = cublas_lt.cublas_lt(gpu)
    modules |= {"nvmath": nvmath, "nvmath.bindings": nvmath.bindings}
    modules["nvmath.bindings.cublasLt"] = nvmath.bindings.cublasLt
    with contextlib.ExitStack() as stack:
        if name != "cuda":
            api = modules["tensorrt"] = tensorrt.tensorrt(gpu, version)
            stack.callback(vars(TENSORRT).update, dict(vars(TENSORRT)))
            stack.callback(vars(TENSORRT).pop, "api")
            vars(TENSORRT).update(api=api, _logger=None, _runtime=None)
            backend = importlib.import_module("lockstep_gpu.backends.tensorrt.backend").BACKEND
            build = backend.build

            def built(self: object, graph: Path, out: Path, options: dict):
                return _build(self, build, graph, out, options)

            stack.enter_context(mock.patch.object(backend, "build", built))
        before = {name: _remove(name) for name in (*modules, *bound())}
        sys.modules.update(modules)
        stack.enter_context(mock.patch.object(driver, "ask_driver", lambda: CAPABILITY))
        cache = stack.enter_context(tempfile.TemporaryDirectory())  # fakes of kernels, which no real GPU may load
        stack.enter_context(mock.patch.object(kernel_cache, "user_cache", lambda *parts: Path(cache, *parts)))
        _reload_in_polygraphy()
        vars(importlib.import_module("lockstep_gpu.kernels.gemm")).update(TRIALS)
        try:
            yield gpu
        finally:
            for key, module in before.items():
                _remove(key)
                if module is not None:
                    _restore(key, module)
    _reload_in_polygraphy()


@functools.cache
def bound() -> tuple[str, ...]:
    """Return the modules that import CUDA where they are imported: they are bound to the fake one."""
    imports = {}
    for path in SOURCES.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
        imports[module] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                imports[module] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    importers: set[str] = set()
    reached = {"lockstep_gpu.cuda"}
    while reached:
        importers |= reached
        reached = {module for module, names in imports.items() if names & importers} - importers
    return ("lockstep_gpu.cuda", *sorted(importers - {"lockstep_gpu.cuda"}))


def _remove(name: str) -> ModuleType | None:
    """Take a module out of `sys.modules` and out of its package; gives it, None where it was not imported."""
    package, _, attribute = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(attribute, None)
    return sys.modules.pop(name, None)


def _restore(name: str, module: ModuleType) -> None:
    package, _, attribute = name.rpartition(".")
    sys.modules[name] = module
    if package in sys.modules:
        setattr(sys.modules[package], attribute, module)


def _reload_in_polygraphy() -> None:
    """Let Polygraphy's lazy imports of TensorRT, which are cached, be resolved once more."""
    for module in [module for path, module in sys.modules.items() if path.startswith("polygraphy.")]:
        lazy = vars(module).get("trt")
        if type(lazy).__name__ == "LazyModule":
            object.__setattr__(lazy, "module", None)


def _build(backend: object, real: Callable, graph: Path, out: Path, options: dict):
    """What TensorRTBackend.build does, without TensorRT's builder: the plan is the graph, with the limits of its
    profiles. A build again, in a folder `again`, chooses another tactic for one layer of `middle`."""
    from lockstep.artifacts.files import sha256_file, write_bytes
    from lockstep.backends.base import Built
    from lockstep.backends.profiles import LIMITS
    from lockstep_gpu.backends.tensorrt.layers import ChosenLayer

    if out.suffix != ".engine":
        return real(backend, graph, out, options)
    model = onnx.load(graph)
    model.metadata_props.add(key="limits", value=json.dumps({name: options[name] for name in LIMITS}))
    write_bytes(out, model.SerializeToString())
    tactic = "another" if out.parent.name == "again" and out.stem == "middle" else "one"
    product = ChosenLayer("product", (), "gemm", tactic)
    digest = backend.tactics.take(out.stem, sha256_file(graph), [product], str(out))
    backend.tactics.take_cache(b"cache", {}, str(out))
    return Built({"tactics_sha256": digest})
