"""NVRTC compiles every source of kernels, for the oldest GPU that runs them and for Hopper; it needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest

from lockstep.errors import LockstepError
from lockstep.targets import Results
from lockstep_gpu.backends.cuda.compiler import compile_block
from lockstep_gpu.kernels.library import including, kind_options, library
from lockstep_gpu.state_kernels import THREADS, StateKernelSpec

AMPERE = (8, 0)
HOPPER = (9, 0)
WINDOW = {"value": (1, 150), "past_state": (1, 3, 150)}
RULE = {"query": (1, 32), "key": (1, 32), "value": (1, 80), "decay": (1, 4), "beta": (1, 4)}
E4M3 = ("e4m3.cuh", "fp8_products.cu", "fp8_wgmma.cu")  # from capability 8.9 on, or of Hopper alone
Source = tuple[str, tuple[str, ...]]  # with its options


def generated(results: Results, precision: str) -> Source:
    graph = results.assembly("demo-llama", precision).with_name("middle.onnx")
    block = compile_block(onnx.load(graph))
    kernels = [step.kernel.source for step in block.steps if step.kernel is not None]
    return including("rows.cuh") + "".join(kernels), kind_options(block.dtype)


def sources(dtype: str, capability: tuple[int, int]) -> Iterator[Source]:
    """Yield each file of the library by itself, then what the runtime compiles for activations of a type."""
    from lockstep_gpu.attention.kernel_spec import AttentionKernelSpec

    options = kind_options(dtype)
    for name in library():
        if capability == HOPPER or name not in E4M3:
            yield including(name), kind_options("float32") if name == "float32_decode.cu" else options
    for shapes in (WINDOW, {**RULE, "past_state": (1, 4, 16, 20)}):
        sizes = {"WIDE": 0, "THREADS": THREADS, **StateKernelSpec.of_sizes(shapes, "here", dtype).sizes}
        yield including("state_mixers.cu"), tuple(f"-D{name}={size}" for name, size in sizes.items())
    for query_dtype in (dtype, "float32"):
        for fp8 in {False, dtype == "float16"}:
            spec = AttentionKernelSpec(dtype, query_dtype, False, 8, 2, 128, 128, 0, fp8=fp8)
            yield including("paged_decode.cu"), (*spec.options, "-DBY_ROW=1")
            yield including("apply_rope.cu"), spec.options
        if fp8:
            yield including("fp8_pages.cu"), spec.options
    spec = AttentionKernelSpec("float32", "float32", False, 12, 2, 96, 40, 50, sinks=True, softcap=2.0)
    yield including("float32_decode.cu"), (*spec.options, "-DBY_ROW=1")
    yield including("apply_rope.cu"), spec.options
    yield including("float32_products.cu"), kind_options("float32")
    yield including("step.cu", "next_token.cu"), ()


@pytest.fixture
def check_compiles() -> Iterator[object]:
    pytest.importorskip("cuda.bindings.nvrtc")
    from lockstep_gpu import cuda
    from lockstep_gpu.libraries import require_nvrtc

    try:
        require_nvrtc()
    except LockstepError as error:
        pytest.skip(str(error))
    return lambda source, capability: cuda.compile_source(*source, capability)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_kernels_of_a_block_are_compiled(check_compiles, demo_bf16, capability):
    check_compiles(generated(demo_bf16, "bf16"), capability)


@pytest.mark.long
@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_of_our_own_are_compiled(check_compiles, dtype, capability):
    for source in sources(dtype, capability):
        check_compiles(source, capability)
