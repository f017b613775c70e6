"""NVRTC compiles every source of kernels, for the oldest GPU that runs them and for Hopper; it needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest

from lockstep.errors import LockstepError
from lockstep.targets import Results
from lockstep_gpu.backends.cuda.compiler import compile_block
from lockstep_gpu.kernels.numbers import kind_options
from lockstep_gpu.kernels.row_kernels import COMMON, E4M3, PRELUDE
from lockstep_gpu.state_kernels import StateKernelSpec

AMPERE = (8, 0)
HOPPER = (9, 0)
WINDOW = {"value": (1, 150), "past_state": (1, 3, 150)}
RULE = {"query": (1, 32), "key": (1, 32), "value": (1, 80), "decay": (1, 4), "beta": (1, 4)}
Source = tuple[str, tuple[str, ...]]  # with its options


def generated(results: Results, precision: str) -> Source:
    graph = results.assembly("demo-llama", precision).with_name("middle.onnx")
    block = compile_block(onnx.load(graph))
    kernels = [step.kernel.source for step in block.steps if step.kernel is not None]
    return PRELUDE + E4M3 + "".join(kernels), kind_options(block.dtype)


def sources(dtype: str, capability: tuple[int, int]) -> Iterator[Source]:
    """Yield what the runtime compiles for activations of a type."""
    from lockstep_gpu.attention.fp8_pages import SOURCE as FP8_PAGES
    from lockstep_gpu.attention.kernel_spec import FP8_WORDS, WORDS, AttentionKernelSpec
    from lockstep_gpu.attention.paged_decode import SOURCE as DECODE
    from lockstep_gpu.attention.rope_kernel import SOURCE as ROPE
    from lockstep_gpu.kernels import expert_products, fp8_gemm, gemm, products, step_kernels
    from lockstep_gpu.ranks import all_reduce
    from lockstep_gpu.state_mixers import SOURCE as STATES
    from lockstep_gpu.state_mixers import THREADS

    options = kind_options(dtype)
    yield gemm.SOURCE, options
    yield expert_products.SOURCES["floats"], options
    yield expert_products.SOURCES["small"], options
    yield products.LORA_SOURCE, options
    yield COMMON + all_reduce.SUMS + all_reduce.SOURCE, ("-DWORLD=2", "-DROOM=64", *options)
    for shapes in (WINDOW, {**RULE, "past_state": (1, 4, 16, 20)}):
        sizes = {"WIDE": 0, "THREADS": THREADS, **StateKernelSpec.of_sizes(shapes, "here", dtype).sizes}
        yield STATES, tuple(f"-D{name}={size}" for name, size in sizes.items())
    for query_dtype in (dtype, "float32"):
        spec = AttentionKernelSpec(dtype, query_dtype, False, 8, 2, 128, 128, 0)
        yield WORDS + DECODE, (*spec.options, "-DBY_ROW=0")
        yield WORDS + ROPE, spec.options
    if dtype == "float16":  # and what is of this type alone
        spec = AttentionKernelSpec(dtype, dtype, False, 8, 2, 128, 128, 0, fp8=True)
        yield WORDS + FP8_WORDS + DECODE, (*spec.options, "-DBY_ROW=0")
        yield FP8_PAGES, spec.options
        yield products.SOURCE, ()
        yield step_kernels.SOURCE, ()
    if dtype == "float16" and capability == HOPPER:
        yield fp8_gemm.SOURCE + fp8_gemm.TILES, ()


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
