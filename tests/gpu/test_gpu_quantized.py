"""Quantised weights on a GPU: the kernels against NumPy, and engines of the demo against ONNX Runtime."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from lockstep.artifacts.assembly import Assembly
from lockstep.backends import builder
from lockstep.onnx_tools.products import Product
from lockstep.onnx_tools.signature import ACTIVATIONS
from lockstep.runtime import Advance, Model, ModelOptions
from lockstep.targets import Limits
from lockstep.tolerances import Tolerances
from lockstep.verify import compare
from lockstep_gpu.backends.cuda.compiler import multiply

# (out_features of each, in_features): rows that are no multiple of what a block or a warp takes; several weights of one
# input; as wide as two tiles of a warp.
SHAPES = [((48,), 128), ((40, 24, 8), 288), ((100,), 144), ((8200,), 256), ((3, 5, 7, 9), 256), ((64, 32), 4096)]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FORMS = [(16, 0), (8, 16), (8, 32), (8, 128), (4, 16), (4, 32), (4, 128), (8, 0)]  # of 8 bits without groups: e4m3
LIMITS = {"max_batch_size": 12, "max_num_tokens": 128, "max_seq_len": 256}
# The demo's logits reach 20. fp16 activations: 11 bits of each number between two products. Seen 0.03.
TOLERANCE = {"w8a16": 0.1, "w4a16": 0.1, "w8a8-fp8": 3.0}  # e4m3: activations become another number; 1.4 is seen


PRODUCTS = []
for dtype, form, shape in itertools.product(("float16", "bfloat16"), FORMS, SHAPES):
    if dtype == "bfloat16" and shape not in SHAPES[1::2]:
        continue
    if form[1] and shape[1] % form[1]:  # no whole number of groups
        continue
    is_long = form not in FORMS[::2] and shape != SHAPES[1]
    PRODUCTS.append(pytest.param(dtype, *form, *shape, marks=[pytest.mark.long] * is_long))


@pytest.mark.parametrize("dtype, bits, group, outs, columns", PRODUCTS)
def test_products_are_those_of_numpy(dtype, bits, group, outs, columns):
    from lockstep_gpu import cuda
    from lockstep_gpu.kernels.products import Products, SmallWeight
    from lockstep_gpu.kernels.row_kernels import SCALES_TIMES

    if (bits, group) == (8, 0) and cuda.compute_capability(0) < (8, 9):
        pytest.skip("needs compute capability 8.9")
    random = np.random.default_rng(bits + group + columns)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    stream = cuda.Stream()
    total = sum(outs)

    def up(host: np.ndarray) -> cuda.Array:
        array = cuda.empty(host.shape, host.dtype)
        stream.upload(array, np.ascontiguousarray(host))
        stream.synchronize()
        return array

    if bits == 16:
        host = [(random.standard_normal((total, columns)) / 8).astype(kind)]
        data = up(host[0])
        weight = SmallWeight(data, data, bits, 0, columns, outs)
    elif not group:
        host = [random.standard_normal((total, columns)).astype(E4M3), random.random(total, np.float32) / 8]
        weight = SmallWeight(up(host[0]), up(host[1]), bits, 0, columns, outs)
    else:
        numbers = random.integers(0, 256, (total, columns // group, group * bits // 8), np.uint8)
        scales = (random.standard_normal((total, columns // group)) * 2.0**-bits / 8).astype(np.float16)
        host = [numbers, scales.astype(np.float32)]
        weight = SmallWeight(
            up(numbers), up((host[1] * SCALES_TIMES).astype(np.float16)), bits, group, columns, outs
        )  # fmt: skip
    product = Product("x", "y", ("w", "scales")[: len(host)], bits, group, columns, total)
    products = Products(stream, kind)
    same = random.standard_normal((80, columns)).astype(kind)
    first_rows = []
    for rows in (5, 16, 33, 80):
        x = same[:rows]
        activations = up(x)
        actual = [cuda.empty((rows + 1, size), kind) for size in outs]
        before = np.full((rows + 1, max(outs)), 7, kind)
        for array, size in zip(actual, outs):
            stream.upload(array, np.ascontiguousarray(before[:, :size]))
        products.bind(weight, activations, actual)(rows)
        expected = multiply(product, {"x": x, **dict(zip(product.slots, host))}).astype(np.float32)
        start = 0
        largest = np.abs(expected).max()
        for array, size in zip(actual, outs):
            products_of_weight = np.empty(array.shape, kind)
            stream.download(products_of_weight, array)
            stream.synchronize()
            error = np.abs(products_of_weight[:rows].astype(np.float32) - expected[:, start : start + size]).max()
            # Weights may be rounded to 16 bits with their scale, sums are fp32 in another order, results have 16 bits.
            assert error <= (2e-3 if dtype == "float16" else 8e-3) * largest, (rows, size, error, largest)
            assert (products_of_weight[rows] == 7).all()  # nothing is written after the rows
            start += size
            first_rows.append((size, products_of_weight[:5].tobytes()))
    if bits == 16 or (group and dtype == "bfloat16"):  # a row has the same bits in any company
        assert len(set(first_rows)) == len(set(outs))


def with_bfloat16(assembly_path: Path, folder: Path) -> Path:
    """Return an assembly that asks for bf16 activations, as `export` writes it, and its graphs, in `folder`."""
    shutil.copytree(assembly_path.parent, folder)
    assembly = Assembly.load(assembly_path)
    classes = {}
    for name, graph in assembly.classes.items():
        model = onnx.load(folder / graph.file)
        model.metadata_props.add(key=ACTIVATIONS, value="bfloat16")
        data = model.SerializeToString(deterministic=True)
        (folder / graph.file).write_bytes(data)
        classes[name] = replace(graph, sha256=hashlib.sha256(data).hexdigest())
    replace(assembly, classes=classes, activations="bfloat16").save(folder / assembly_path.name)
    return folder / assembly_path.name


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    "precision, activations",
    [
        pytest.param("w8a16", None, marks=pytest.mark.long),
        ("w4a16", None),
        ("w8a8-fp8", None),
        ("w8a16", "bfloat16"),
        pytest.param("w8a8-fp8", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_logits_are_those_of_onnx_runtime(quantized_demo, tmp_path, backend, precision, activations):
    assembly = quantized_demo.assembly("demo-llama", precision)
    tensors = quantized_demo.weights("demo-llama", precision)
    reference = builder.build(assembly, "onnxruntime", tmp_path / "onnxruntime" / "engines.json")
    run = with_bfloat16(assembly, tmp_path / "graphs") if activations else assembly
    built = builder.build(run, backend, tmp_path / backend / "engines.json", LIMITS)
    pair = [
        Model.open(reference, assembly, tensors, options=ModelOptions(**LIMITS)),
        Model.open(built, run, tensors, options=ModelOptions(**LIMITS)),
    ]
    allowed = TOLERANCE[precision] * (8 if activations and precision != "w8a8-fp8" else 1)
    random = np.random.default_rng(0)

    def step(advances: list[Advance]) -> list[int]:
        expected, actual = (model.step(advances) for model in pair)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=allowed)
        return expected.argmax(axis=1).tolist()

    tokens = step([Advance(0, random.integers(0, 768, 40), 0)])
    for number in range(4):  # one row: as it is, captured, then the graph
        tokens = step([Advance(0, np.array(tokens), 40 + number)])
    slots = range(1, 12)
    tokens = step([Advance(slot, random.integers(0, 768, 3), 0) for slot in slots])
    for number in range(3):  # more rows than the kernel takes
        tokens = step([Advance(slot, np.array([token]), 3 + number) for slot, token in zip(slots, tokens)])
    step([Advance(1, np.array(tokens[:1]), 6), Advance(0, random.integers(0, 768, 60), 0)])


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_engines_of_e4m3_compute_what_their_graphs_do(quantized_demo, tmp_path, backend):
    assembly, tensors = (of("demo-llama", "w8a8-fp8") for of in (quantized_demo.assembly, quantized_demo.weights))
    engines = builder.build(assembly, backend, tmp_path / "engines" / "engines.json", LIMITS)
    compare.run(assembly, tensors, engines, Tolerances("w8a8-fp8", backend), Limits(), tmp_path / "compare.json")
