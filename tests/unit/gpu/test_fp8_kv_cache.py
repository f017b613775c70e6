"""A KV cache of e4m3 numbers: its kernels compiled for the host, engines of `cuda` against a reference that rounds the
same, and the faults that would show."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from demo_model import CONFIG, LIMITS
from quantized_models import PROMPTS, refer
from quantized_models import demo as quantized_demo

import fake_gpu
import fp8_pages
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.reference import ReferenceManifest
from lockstep.backends.builder import build
from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.runtime import Advance, Model, ModelOptions
from lockstep.stages import STAGES
from lockstep.targets import Results, Target
from lockstep.verify.golden.check import check_engines
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.rounded import rounded_heads as rounded

SIZES = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
COMPILER = shutil.which("c++") or shutil.which("g++")
TESTS = Path(__file__).parents[2]
KERNELS = TESTS.parent / "src" / "lockstep_gpu" / "kernels"
DIM = 40
VALUE_DIM = 24
HEADS = 3
SOURCE = """
#define BLOCK_THREADS THREADS
#include "fake_gpu/host_block.h"
#include "fake_gpu/host_numbers.h"
#include "fake_gpu/host_attention.h"
#include "fp8_pages.cu"
extern "C" void write(int tokens, const float* key, const Bits* value, Code* keys, Code* values, const float* own,
                      const float* other, const int* partner, const int* rows, const long long* positions,
                      const int* pages, int pages_per_row) {
    launch(tokens * HEAD_BLOCKS, [=] { write_pages(0, key, value, 0, keys, values, own, other, partner, rows, positions,
                                                   pages, pages_per_row); });
}
extern "C" void read(int requests, const Code* keys, const Code* values, const int* table, int pages_per_row,
                     const int* held, Bits* keys_out, Bits* values_out) {
    launch(requests * pages_per_row * KV_HEADS, [=] { read_pages(keys, values, table, pages_per_row, held, keys_out,
                                                                 values_out); });
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(SOURCE)
    sizes = {
        "DIM": DIM, "VALUE_DIM": VALUE_DIM, "KV_HEADS": HEADS, "PAGE": 64, "THREADS": 128, "WIDE": 1, "SEPARATE": 0,
        "GROUP": 2, "QK_KIND": 0,
    }  # fmt: skip
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-Wl,-Bsymbolic"]
    options += [f"-D{name}={size}" for name, size in sizes.items()]
    command = [COMPILER, *options, f"-I{TESTS}", f"-I{KERNELS}", "kernels.cpp", "-o", "kernels.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def heads_of_all_sizes(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Heads of fp16 numbers, of which each has another size: from the smallest to the end of fp16."""
    heads = random.standard_normal(shape) * 2.0 ** random.integers(-24, 15, (*shape[:-1], 1))
    heads.reshape(-1, shape[-1])[0] = 0
    heads.reshape(-1, shape[-1])[1, 0] = 65504
    return np.clip(heads, -65504, 65504).astype(np.float16)


def test_the_kernels_keep_what_the_reference_rounds_to(kernels):
    """To the bit; a page that is read has zeros after its request's tokens, and NaN where a head has one."""
    random = np.random.default_rng(0)
    tokens = 130
    dim = DIM
    value_dim = VALUE_DIM
    key, value = (heads_of_all_sizes(random, tokens, 3, size) for size in (dim, value_dim))
    value[7, 2, 3] = np.inf
    angles = random.standard_normal((tokens, dim)).astype(np.float32)
    first_weight = np.cos(angles)
    other = np.sin(angles)
    partner = np.roll(np.arange(dim, dtype=np.int32), dim // 2)
    rows = np.zeros(tokens, np.int32)
    positions = np.arange(tokens)
    rows[5] = -1
    table = np.array([[4, 0, 2]], np.int32)
    keys, values = (np.full((5, 3, 64 * (size + 1)), 0x7E, np.uint8) for size in (dim, value_dim))
    arrays = key.astype(np.float32), value, keys, values, first_weight, other, partner, rows, positions, table
    kernels.write(tokens, *map(address, arrays), 3)
    actual = [np.full((3, 3, 64, size), np.nan, np.float16) for size in (dim, value_dim)]
    position_array = np.array([tokens - 1], np.int32)
    kernels.read(1, address(keys), address(values), address(table), 3, address(position_array), *map(address, actual))
    product = (
        (key * first_weight[:, None]).astype(np.float32).astype(np.float64)
    )  # a fused product and sum is of one rounding
    with_rope = (product + key[:, :, partner].astype(np.float64) * other[:, None]).astype(np.float32).astype(np.float16)
    for heads, pages in zip((with_rope, value), actual):
        expected = rounded(torch.from_numpy(heads.astype(np.float32))).numpy()
        rows_read = pages.swapaxes(1, 2).reshape(-1, 3, heads.shape[2])
        assert not rows_read[position_array[0] :].any()
        full = np.isfinite(heads).all(-1) & (rows >= 0)[:, None]
        full[position_array[0] :] = False
        np.testing.assert_array_equal(rows_read[:tokens][full], expected[full].astype(np.float16))
    assert np.isnan(actual[1].swapaxes(1, 2).reshape(-1, 3, value_dim)[7, 2]).all()
    assert not (keys[[1, 3]] != 0x7E).any()


@pytest.mark.parametrize("size", [1.0, 1e-6, 300.0])
def test_rounding_is_e4m3_with_the_smallest_scale_that_holds_all(size):
    heads = torch.from_numpy(np.random.default_rng(1).standard_normal((200, 64)) * size).half().float()
    actual = rounded(heads)
    assert torch.equal(rounded(actual), actual) and torch.equal(actual.half().float(), actual)
    scales = 2.0 ** torch.ceil(torch.log2(heads.abs().amax(-1, keepdim=True) / 448)).clamp(-22)
    # Half a step: 2^-4 of a number, or 2^-10 of the scale below e4m3's normal numbers.
    assert ((actual - heads).abs() <= torch.maximum(heads.abs() / 16, scales / 1024)).all()


@pytest.fixture
def gpu() -> Iterator[fake_gpu.Gpu]:
    with fake_gpu.installed(name="cuda") as gpu:
        yield gpu
    assert not gpu.faults


TERMS = GoldenTerms(4, PROMPTS[:2], 70, "fp8")  # the long prompt goes over to its second page


@pytest.fixture(scope="module")
def results(shared, demo) -> Results:
    """The demo in fp16 with a cache of fp8: engines and reference."""

    def make(root: Path) -> None:
        results = Results(root)
        shutil.copytree(demo.root / "demo-llama", root / "model")
        with_fp8_cache(results, "fp16")
        make_reference(results.checkpoint("model"), 2, TERMS, results.reference("model", 2))

    return Results(shared.folder("fp8-kv-cache", make))


def with_fp8_cache(results: Results, precision: str) -> None:
    assembly = results.assembly("model", precision)
    replace(Assembly.load(assembly), kv_cache_dtype="fp8").save(assembly)  # as `export` writes it
    build(assembly, "cuda", results.engines("model", precision, "cuda"), SIZES)


def files(results: Results, precision: str = "fp16") -> tuple[Path, Path, Path]:
    return (
        results.engines("model", precision, "cuda"),
        results.assembly("model", precision),
        results.weights("model", precision),
    )


def checked(results: Results, precision: str, out: Path) -> dict:
    engines, assembly, weights = files(results, precision)
    check_engines(
        assembly, weights, engines, results.reference_of("model", precision, 2), Target("model", precision, 2, "cuda"),
        CONFIG.tolerance("demo-llama", precision, "cuda"), LIMITS, out / "golden.json", out / "speed.json",
    )  # fmt: skip
    return read_json(out / "golden.json")


def test_engines_say_what_the_rounded_cache_says(results, gpu, tmp_path):
    report = checked(results, "fp16", tmp_path)
    assert report["result"] == "pass"
    reference = ReferenceManifest.load(results.reference("model", 2))
    error = QuantizationError.load(results.quantization_error("model", "fp16", 2))
    assert reference.quantization_error is not None and error.kv_cache_dtype == "fp8"
    assert report["max_logit_error"] < report["tolerance"]
    assert error.words().startswith("KV cache in fp8: logits off by")
    assert 0 < error.rms_logit_error < 0.3 and error.perplexity != error.full_perplexity


@pytest.mark.long
def test_quantised_weights_beside_a_rounded_cache(shared, gpu, tmp_path):
    """w8a8-fp8; the quantization error is of both."""
    results = Results(tmp_path / "results")
    shutil.copytree(quantized_demo(shared, "w8a8-fp8").root, results.root)
    with_fp8_cache(results, "w8a8-fp8")
    make_reference(results.checkpoint("model"), 2, TERMS, results.reference("model", 2))
    refer(results, "w8a8-fp8", 2, TERMS)
    assert checked(results, "w8a8-fp8", tmp_path)["result"] == "pass"
    assert QuantizationError.load(results.quantization_error("model", "w8a8-fp8", 2)).kv_cache_dtype == "fp8"


def test_a_page_takes_half_the_memory_and_is_moved_whole(results, gpu):
    """Swapped out and back in: the bits of a request that stays."""
    plain = replace(Assembly.load(files(results)[1]), kv_cache_dtype=None)
    sizes = 2 * (plain.variants["attention"].head_dim + plain.variants["attention"].value_head_dim)
    model = Model.open(*files(results), 2, ModelOptions(**SIZES))
    executor = model.executor
    assert executor.tables.pool.page_nbytes == 2 * 64 * (sizes + 4)  # layers, tokens; a byte of scale a head
    prompt = np.arange(70) % 768
    random = np.random.default_rng(0)
    model.step([Advance(0, prompt, 0)])
    expected = model.step([Advance(0, prompt[:1], 70)])
    model.release(0)
    model.step([Advance(1, prompt, 0)])
    swapped = model.swap_out(1)
    model.step([Advance(0, random.integers(0, 768, 100), 0)])  # into pages that slot 1 had
    model.tables.reserve({1: 70})
    model.swap_in(1, swapped)
    np.testing.assert_array_equal(model.step([Advance(1, prompt[:1], 70)]), expected)


encode = fp8_pages.encode
decode = fp8_pages.decode


def neighbours_scale(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return decode(codes, np.roll(scales, 1, axis=-1))


def another_type(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e5m2 read for e4m3."""
    wrong = codes.view(ml_dtypes.float8_e5m2).astype(np.float32)
    return wrong * decode(np.full((*scales.shape, 1), 0x38, np.uint8), scales)


def without_saturation(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A scale that is half as large, and NaN beyond the largest number."""
    scales = encode(heads)[1] - 4
    codes = (heads.astype(np.float32) * 2.0 ** (23.0 - scales[..., None] // 4)).astype(fp8_pages.E4M3)
    return codes.view(np.uint8), scales


@pytest.mark.long
@pytest.mark.parametrize("fault", [neighbours_scale, another_type, without_saturation])
def test_the_golden_check_finds(results, gpu, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(fp8_pages, "encode" if fault is without_saturation else "decode", fault)
    with pytest.raises(CheckError):
        checked(results, "fp16", tmp_path)


def test_other_backends_refuse_it_in_one_line(results, tmp_path):
    line = "kv_cache_dtype is not supported by backend onnxruntime; got fp8; export without, or use the backend cuda"
    with pytest.raises(InputError, match=line):
        build(files(results)[1], "onnxruntime", tmp_path / "engines.json")
    model = {"source": "resources/demo-llama", "kv_cache_dtype": "fp8"}
    line = "models.demo.kv_cache_dtype: expected none for backend onnxruntime; it is for cuda; found 'fp8'"
    with pytest.raises(InputError, match=line):
        load.load({"models": {"demo": model}})
    config = load.load({"models": {"demo": {**model, "precisions": ["fp16"], "backends": ["cuda"]}}})
    names = {"model": "demo", "precision": "fp16"}
    assert STAGES["export"].options(config, names) == {"kv_cache_dtype": "fp8"}
    assert STAGES["reference"].options(config, {**names, "layers": "all"})["golden"]["kv_cache_dtype"] == "fp8"
