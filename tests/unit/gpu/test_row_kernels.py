"""Kernels of the operators between products: their source, compiled for the host, against ONNX Runtime."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnx
import pytest
from families import FAMILIES, some_families
from onnx import TensorProto, helper

from fake_gpu import compiled
from lockstep.artifacts.dtypes import named_dtype
from lockstep.errors import CheckError
from lockstep.onnx_tools.chosen_experts import ChosenExperts
from lockstep.onnx_tools.cut_products import cut_products
from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.onnx_tools.widened import in_float32
from lockstep.weights import e4m3
from lockstep_gpu.kernels.library import including, library
from lockstep_gpu.kernels.row_kernels import CHOICES, INDEX, ROWS, SCALES, SCALES_TIMES, WEIGHT, RowKernel
from lockstep_gpu.kernels.row_operators import EXPRESSIONS, row_kernel
from shared import Shared
from some import some

# float32 inside and one rounding to fp16, against ONNX Runtime's after each operator.
TOLERANCE = 4e-3

RMS = """
agraph (float16[num_tokens, W] a, float16[num_tokens, W] b, float16[W] w)
=> (float16[num_tokens, W] s, float16[num_tokens, W] y)
<int64[1] last = {-1}, float two = {2}, float eps = {1e-5}> {
    s = Add(a, b)
    wide = Cast<to = 1>(s)
    square = Pow(wide, two)
    mean = ReduceMean<keepdims = 1>(square, last)
    shifted = Add(mean, eps)
    root = Sqrt(shifted)
    by = Reciprocal(root)
    scaled = Mul(wide, by)
    narrow = Cast<to = 10>(scaled)
    y = Mul(w, narrow)
}"""
LAYER_NORM = """
agraph (float16[num_tokens, W] a, float16[W] w, float16[W] b) => (float16[num_tokens, W] y)
<int64[1] last = {-1}, float eps = {1e-5}> {
    wide = Cast<to = 1>(a)
    mean = ReduceMean<keepdims = 1>(wide, last)
    off = Sub(wide, mean)
    square = Mul(off, off)
    variance = ReduceMean<keepdims = 1>(square, last)
    shifted = Add(variance, eps)
    root = Sqrt(shifted)
    scaled = Div(off, root)
    narrow = Cast<to = 10>(scaled)
    weighted = Mul(narrow, w)
    y = Add(weighted, b)
}"""
NORM = """
agraph (float16[num_tokens, W] a, float16[W] w, float16[W] b) => (float16[num_tokens, W] y, float16[num_tokens, W] z)
{
    y = LayerNormalization<axis = -1, epsilon = 1e-5>(a, w, b)
    plain = LayerNormalization<axis = -1>(a, w)
    z = Gelu<approximate = "tanh">(plain)
}"""
HEADS = """
agraph (float16[num_tokens, W] q, float16[D] w) => (float16[num_tokens, W] y)
<int64[1] last = {-1}, float eps = {1e-6}, int64[3] heads = {0, 4, -1}, int64[2] flat = {0, -1}> {
    split = Reshape(q, heads)
    wide = Cast<to = 1>(split)
    square = Mul(wide, wide)
    mean = ReduceMean<keepdims = 1>(square, last)
    shifted = Add(mean, eps)
    root = Sqrt(shifted)
    scaled = Div(wide, root)
    narrow = Cast<to = 10>(scaled)
    weighted = Mul(narrow, w)
    y = Reshape(weighted, flat)
}"""
GATED = """
agraph (float16[num_tokens, W] a) => (float16[num_tokens, H] y)
<int64[2] sizes = {H, H}, float one = {1}, float root = {0.70710678}, float half = {0.5}> {
    gate, up = Split<axis = -1>(a, sizes)
    wide = Cast<to = 1>(gate)
    inner = Mul(wide, root)
    error = Erf(inner)
    more = Add(error, one)
    most = Mul(wide, more)
    gelu = Mul(most, half)
    narrow = Cast<to = 10>(gelu)
    y = Mul(narrow, up)
}"""
CAPPED = """
agraph (float16[num_tokens, W] a) => (float16[num_tokens, W] y)
<float16 cap = {30}> {
    small = Div(a, cap)
    bounded = Tanh(small)
    y = Mul(bounded, cap)
}"""
TAKEN = """
agraph (int64[num_requests] rows, float16[num_tokens, W] a, float16[num_tokens, W] b) => (float16[num_requests, W] y)
{
    of_a = Gather<axis = 0>(a, rows)
    of_b = Gather<axis = 0>(b, rows)
    sum = Add(of_a, of_b)
    y = Relu(sum)
}"""
PARTS = """
agraph (float16[num_tokens, W] a) => (float16[num_tokens, H] y, float16[num_tokens, W] z)
<int64[1] from = {H}, int64[1] to = {W}, int64[1] axis = {1}> {
    end = Slice(a, from, to, axis)
    y = Sigmoid(end)
    z = Neg(a)
}"""

AS_ROWS = HEADS.replace("int64[3] heads = {0, 4, -1}", "int64[2] heads = {-1, D}").replace("{0, -1}", "{-1, W}")
TAPS = """
agraph (float16[num_tokens, W] a, float16[H, 1, 2] w) => (float16[num_tokens, H] y)
<int64[3] taps = {-1, 2, H}, int64[1] one = {1}, float low = {-0.5}, float high = {0.75}> {
    rows = Reshape(a, taps)
    flat = Squeeze(w, one)
    turned = Transpose<perm = [1, 0]>(flat)
    weighted = Mul(rows, turned)
    sum = ReduceSum<keepdims = 0>(weighted, one)
    wide = Cast<to = 1>(sum)
    bounded = Clip(wide, low, high)
    bent = Atanh(bounded)
    y = Cast<to = 10>(bent)
}"""
JOINED = """
agraph (float16[num_tokens, W] a, float16[1, H] w) => (float16[num_tokens, W] y)
<int64[2] sizes = {H, H}> {
    gate, up = Split<axis = -1>(a, sizes)
    shape = Shape(gate)
    columns = Expand(w, shape)
    y = Concat<axis = -1>(up, columns)
}"""


# Heads turned after a norm, and parts of each.
TURNED = """
agraph (float16[num_tokens, W] q, float16[D] w) => (float16[num_tokens, H] y, float16[num_tokens, 4] z)
<int64[1] last = {-1}, int64[3] heads = {-1, 4, D}, int64[2] flat = {-1, H}, int64[2] four = {-1, 4}> {
    split = Reshape(q, heads)
    turned = Transpose<perm = [1, 0, 2]>(split)
    norm = LayerNormalization<axis = -1>(turned, w)
    first, second = Split<axis = 0, num_outputs = 2>(norm)
    swapped = Sub(second, first)
    back = Transpose<perm = [1, 0, 2]>(swapped)
    y = Reshape(back, flat)
    top = ReduceMax<keepdims = 0>(turned, last)
    across = Transpose<perm = [1, 0]>(top)
    z = Reshape(across, four)
}"""
LEARNED = """
agraph (int64[num_tokens] at, float16[9, W] table) => (float16[1, num_tokens, W] y)
<int64 two = {2}, int64[1] first = {0}, float[1, H] rates = {RATES}> {
    later = Add(at, two)
    row = Unsqueeze(later, first)
    taken = Gather<axis = 0>(table, row)
    last = Unsqueeze(row, minus)
    wide = Cast<to = 1>(last)
    angles = Mul(wide, rates)
    waves = Cos(angles)
    others = Sin(angles)
    both = Concat<axis = -1>(waves, others)
    narrow = Cast<to = 10>(both)
    y = Add(taken, narrow)
}""".replace("int64[1] first = {0}", "int64[1] first = {0}, int64[1] minus = {-1}")
# Scores in two groups, of which one is left, then two experts of that, and their weights.
ROUTED = """
agraph (float16[num_tokens, 8] a, float16[8] bias)
=> (int64[num_tokens, 2] ids, int64[num_tokens, 1] best_id, float16[num_tokens, 2] y)
<int64[3] groups = {-1, 2, 4}, int64[2] flat = {-1, 8}, int64[1] one = {1}, int64[1] two = {2}, int64[1] last = {-1},
 float none = {-inf}> {
    wide = Cast<to = 1>(a)
    score = Softmax<axis = -1>(wide)
    offset = Cast<to = 1>(bias)
    chosen = Add(score, offset)
    split = Reshape(chosen, groups)
    best, unread = TopK<axis = -1, sorted = 0>(split, two)
    sums = ReduceSum<keepdims = 0>(best, last)
    unread_too, group = TopK<axis = -1, sorted = 0>(sums, one)
    zeros = Sub(sums, sums)
    ones = Exp(group_float)
    mask = ScatterElements<axis = 1>(zeros, group, ones)
    each = Unsqueeze(mask, last)
    size = Shape(split)
    whole = Expand(each, size)
    masks = Reshape(whole, flat)
    is_in = Cast<to = 9>(masks)
    is_out = Not(is_in)
    left = Where(is_out, none, chosen)
    unread_three, ids = TopK<axis = -1, sorted = 0>(left, two)
    best_id = ArgMax<axis = -1>(left)
    weights = GatherElements<axis = 1>(score, ids)
    y = Cast<to = 10>(weights)
}""".replace("    ones = Exp", "    group_float = Cast<to = 1>(group)\n    ones = Exp")
# Biases of a token's experts.
BIASED = """
agraph (float16[num_tokens, W] a, int64[num_tokens, 2] ids, float16[8, W] bias) => (float16[num_tokens, W] y)
<int64[2] column = {-1, 1}, int64[3] pairs = {-1, 2, W}, int64[1] one = {1}> {
    same = Identity(a)
    flat = Flatten<axis = 1>(same)
    shape = Shape(flat)
    ones = ConstantOfShape<value = float16[1] {1}>(shape)
    at = Reshape(ids, column)
    rows = GatherND(bias, at)
    by_token = Reshape(rows, pairs)
    chosen = ReduceSum<keepdims = 0>(by_token, one)
    offset = Sub(chosen, ones)
    y = Add(flat, offset)
}"""

# a residual stream in float32
WIDE = RMS.replace("float16[num_tokens, W] a", "float[num_tokens, W] a").replace(
    "float16[num_tokens, W] s", "float[num_tokens, W] s"
)
WIDE = WIDE.replace("s = Add(a, b)", "more = Cast<to = 1>(b)\n    s = Add(a, more)")

TEXTS = [RMS, LAYER_NORM, NORM, HEADS, GATED, CAPPED, TAKEN, PARTS, JOINED, AS_ROWS, TURNED, LEARNED, ROUTED, BIASED]

EMBEDDING = """
agraph (int64[num_tokens] ids, uint8[96, GROUPS, BYTES] data, float16[96, GROUPS] scales) => (float16[num_tokens, W] y)
<int64[1] last = {-1}, int64[2] flat = {-1, W}> {
    wide = Cast<to = 1>(scales)
    of_groups = Unsqueeze(wide, last)
    groups = com.microsoft.GatherBlockQuantized<bits = BITS, block_size = 16, quantize_axis = 2>(data, ids, of_groups)
    rows = Reshape(groups, flat)
    y = Cast<to = 10>(rows)
}"""


def piece(text: str, width: int) -> onnx.ModelProto:
    """W: the width; H: half of it; D: a fourth."""
    for letter, size in (("W", width), ("H", width // 2), ("D", width // 4)):
        text = text.replace(f", {letter}]", f", {size}]").replace(f"[{letter}]", f"[{size}]")
        text = text.replace(f"[{letter}, ", f"[{size}, ")
        text = text.replace(f"{{{letter}", f"{{{size}").replace(f", {letter}}}", f", {size}}}")
        text = text.replace(f", {letter}, ", f", {size}, ")
    text = text.replace("RATES", ", ".join(f"{1 / (number + 1)}" for number in range(width // 2)))
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>{text}')


def of_rows(array: np.ndarray) -> np.ndarray:
    """[rows, width] of [1, ..., rows, ...]."""
    while array.ndim > 2 and len(array) == 1:
        (array,) = array
    return array.reshape(len(array), -1)


def run(kernel: RowKernel, feeds: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs. Arrays of rows are in wider ones, whose other numbers stay as they are."""
    arguments: list[Any] = []
    arrays: list[np.ndarray] = []

    def add(array: np.ndarray, step: int | None = None) -> None:
        arrays.append(array)
        arguments.append(ctypes.c_void_p(array.ctypes.data))
        if step is not None:
            arguments.append(ctypes.c_int(step))

    def wider(array: np.ndarray) -> np.ndarray:
        flat = of_rows(array)
        padded = np.full((len(flat), flat.shape[1] + 16), 7, array.dtype)
        padded[:, : flat.shape[1]] = flat
        return padded

    for name, kind in kernel.arguments:
        array = np.ascontiguousarray(feeds[name], np.int32 if kind == CHOICES else None)
        if kind in (ROWS, CHOICES):
            array = wider(array)
        add(array, array.shape[1] if kind in (ROWS, CHOICES) else 1 if kind == INDEX else None)
    shapes = {name: array.shape for name, array in outputs.items()}
    outputs = {name: of_rows(array) for name, array in outputs.items()}
    # A graph's float32, such as weights of chosen experts, is stored in 16 bits but in the residual stream.
    types = {name: np.float32 if name in kernel.wide else np.float16 for name in outputs}
    types |= {name: np.int32 for name, array in outputs.items() if array.dtype.kind == "i"}
    results = {name: wider(np.zeros_like(outputs[name], types[name])) for name in kernel.outputs}
    for array in results.values():
        add(array, array.shape[1])
    text = compiled.source(compiled.flat(including("rows.cuh", "e4m3.cuh"), library()) + kernel.source, kernel.name)
    assert text.startswith(f"// {kernel.threads} threads")
    rows = len(next(iter(outputs.values())))
    codes = {name: np.zeros((rows, outputs[name].shape[1]), np.uint8) for name in kernel.quantized}
    steps = {name: np.zeros((rows, 1), np.float32) for name in kernel.quantized}
    for name in kernel.quantized:
        add(codes[name])
        add(steps[name])
    compiled.compiled_kernel(text)(ctypes.c_int(rows * kernel.blocks), *arguments)
    assert all((array[:, -16:] == 7).all() for array in results.values())
    unpadded = {name: array[:, :-16].reshape(shapes[name]) for name, array in results.items()}
    for name in kernel.quantized:
        numbers, expected = e4m3.rounded(unpadded[name].astype(np.float32))
        assert np.array_equal(steps[name], expected), name
        assert np.array_equal(codes[name].view(named_dtype("float8_e4m3fn")).astype(np.float32), numbers), name
    return unpadded


def compare(model: onnx.ModelProto, kernel: RowKernel) -> None:
    feeds = random_inputs(model)
    # A graph's float32 numbers are loaded in 16 bits too, but for the residual stream.
    narrow = {name for name, kind in kernel.arguments if kind in (ROWS, WEIGHT) and name not in kernel.wide}
    narrow = {name: feeds[name].astype(np.float16) for name in narrow if feeds[name].dtype == np.float32}
    feeds |= {name: array.astype(np.float32) for name, array in narrow.items()}
    session = open_session(model.SerializeToString())
    names = [value.name for value in session.get_outputs()]
    expected = dict(zip(names, session.run(None, feeds)))
    scales = {name: feeds[name] * np.float16(SCALES_TIMES) for name, kind in kernel.arguments if kind == SCALES}
    outputs = run(kernel, feeds | narrow | scales, expected)
    is_choice = any(node.op_type == "TopK" for node in model.graph.node)  # its values may be in any order
    for name, values in expected.items():
        actual = outputs[name].astype(np.float32)
        values = values.astype(np.float32)
        if is_choice:
            actual.sort()
            values.sort()
        allowed = TOLERANCE * max(1.0, float(np.abs(values).max()))
        np.testing.assert_allclose(actual, values, rtol=TOLERANCE, atol=allowed, err_msg=name)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", some([128, 4096, 60], 60))
def test_kernels_compute_what_onnx_runtime_does(text: str, width: int) -> None:
    """60: rows that are not made of 16 bytes."""
    model = piece(text, width)
    compare(model, row_kernel(model, "kernel"))


@pytest.mark.parametrize("width", [128, 60])
def test_rows_of_a_wide_residual_stream_are_float32(width: int) -> None:
    model = piece(WIDE, width)
    kernel = row_kernel(model, "kernel", wide={"a", "s"})
    assert kernel.wide == ("a", "s")
    compare(model, kernel)


def test_an_operator_of_single_elements_has_one_expression() -> None:
    """All of them in one kernel; a choice by a comparison."""
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["num_tokens", 8]) for name in "ab"]
    nodes = [helper.make_node("Cast", [name], [f"{name}_wide"], to=TensorProto.FLOAT) for name in "ab"]
    # "share": operands for which Log, Sqrt, Atanh and Reciprocal are defined.
    nodes.append(helper.make_node("Sigmoid", ["a_wide"], ["share"]))
    nodes.append(helper.make_node("Less", ["a_wide", "b_wide"], ["is_less"]))
    nodes.append(helper.make_node("Not", ["is_less"], ["is_not"]))
    results = []
    for operator, form in EXPRESSIONS.items():
        if operator == "Not":
            continue
        operands = ["share", "b_wide"] if operator in ("Log", "Sqrt", "Atanh", "Reciprocal") else ["a_wide", "b_wide"]
        operands = ["is_less", "is_not"] if operator in ("And", "Or") else operands
        operands = ["is_less", "a_wide", "b_wide"] if operator == "Where" else operands
        count = 1 + max(number for number in range(3) if f"{{{number}}}" in form or (number < 2 and "{}" in form))
        nodes.append(helper.make_node(operator, operands[:count], [f"{operator}/result"]))
        results.append(f"{operator}/result")
        if operator in ("And", "Or", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
            nodes.append(helper.make_node("Where", [results[-1], "a_wide", "share"], [f"{operator}/chosen"]))
            results[-1] = f"{operator}/chosen"
    nodes += [helper.make_node("Cast", [name], [f"{name}/out"], to=TensorProto.FLOAT16) for name in results]
    outputs = [helper.make_tensor_value_info(f"{name}/out", TensorProto.FLOAT16, ["num_tokens", 8]) for name in results]
    graph = helper.make_graph(nodes, "operators", declared, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    compare(model, row_kernel(model, "kernel"))


def test_a_short_convolution_reads_its_weight_the_other_way_round() -> None:
    model = piece(TAPS, 128)
    compare(model, row_kernel(model, "kernel"))


@pytest.mark.parametrize("text", [RMS, GATED])
def test_what_products_of_e4m3_read_is_made_e4m3_too(text: str) -> None:
    model = piece(text, 4096)
    kernel = row_kernel(model, "kernel", ["y"])
    assert kernel.quantized == ("y",) and kernel.blocks == 1
    compare(model, kernel)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_reads_rows_of_integers(bits: int) -> None:
    text = EMBEDDING.replace("GROUPS", "8").replace("BYTES", str(2 * bits)).replace("BITS", str(bits))
    model = piece(text, 128)
    compare(model, row_kernel(model, "kernel"))


@pytest.mark.parametrize(
    "text, actual",
    [
        (RMS.replace("-1", "0"), "ReduceMean mean along rows$"),
        (PARTS.replace("Neg", "Round"), "Round$"),
        (PARTS.replace("axis = {1}", "axis = {0}").replace("[num_tokens, H]", "[k, W]"), "output y .* not of rows"),
    ],
)
def test_what_has_no_kernel_is_said(text: str, actual: str) -> None:
    with pytest.raises(CheckError, match=f"expected operators that have a CUDA kernel, found {actual}"):
        row_kernel(piece(text, 128), "kernel")


def test_the_source_depends_on_the_graph_alone() -> None:
    first, second = (row_kernel(piece(RMS, 128), "kernel") for _ in range(2))
    assert first == second


@pytest.mark.parametrize("family", some_families("llama", "mixtral", states=True))
def test_blocks_of_the_families(family: str, shared: Shared) -> None:
    """The pieces between the products of each class, and its embedding, compute what its graph does."""
    files, assembly = shared.assembled(dict(FAMILIES[family].config), "fp16")
    for graph in assembly.classes.values():
        model = run_passes(in_float32(onnx.load_model_from_string(files[graph.file])), ChosenExperts())
        for number, piece in enumerate(cut_products(model).pieces):
            compare(piece, row_kernel(piece, f"piece_{number}"))
