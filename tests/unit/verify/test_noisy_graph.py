"""The noise of a graph is what rounding its values does, and no more."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from lockstep.onnx_tools.int8_rounding import rounded
from lockstep.onnx_tools.judge import Spread, measure, wrong
from lockstep.onnx_tools.sessions import compute
from lockstep.onnx_tools.toolkit import to_proto
from lockstep.onnx_tools.widened import widened
from lockstep.tolerances import Tolerances
from lockstep.verify.noisy_graph import NoisyGraph, beside_graph, tolerances_of

HEADER = '<ir_version: 8, opset_import: ["": 18]> g '
PRODUCT = (
    HEADER
    + "(float[n, 64] hidden, float[64, 64] weight) => (float[n, 64] out) { out = Gemm <transB = 1> (hidden, weight) }"
)
ANGLES = (
    HEADER
    + """(float[n, 1] query, int64[n] position_ids) => (float[n, 1] out)
  <float frequency = {0.7}, int64[1] axis = {1}>
  { wide = Cast <to = 1> (position_ids) angle = Mul (wide, frequency) turn = Cos (angle)
    turns = Unsqueeze (turn, axis) out = Mul (query, turns) }"""
)
RANDOM = np.random.default_rng(0)
HIDDEN = RANDOM.standard_normal((300, 64), np.float32)
WEIGHT = RANDOM.standard_normal((64, 64), np.float32)


def noise(model: onnx.ModelProto, feeds: dict[str, np.ndarray], slots: tuple[str, ...] = ()) -> Spread:
    return NoisyGraph(model, slots).noise(feeds, compute(widened(model), feeds))["out"]


@pytest.mark.parametrize("narrow", [False, True])
def test_a_product_is_rounded_once(narrow: bool) -> None:
    """To bf16, an eighth of which is fp16's: at most 2^-9 / 8 of a number, uniform; in a graph of fp16 too."""
    text = PRODUCT.replace("float[", "float16[") if narrow else PRODUCT
    dtype = np.float16 if narrow else np.float32
    feeds = {"hidden": HIDDEN.astype(dtype), "weight": WEIGHT.astype(dtype)}
    actual = noise(onnx.parser.parse_model(text), feeds, ("weight",))
    assert 0.9 * 2**-11 < actual.largest.max() <= 2**-11 and 2**-14 < np.median(actual.rms) < 2**-12


def test_what_is_made_of_positions_alone_is_as_exact_as_in_an_engine() -> None:
    """An angle of 10,000 rounded to bf16 would be another one."""
    positions = np.arange(300)
    feeds = {"query": np.ones((300, 1), np.float32), "position_ids": positions + 14_000}
    assert noise(onnx.parser.parse_model(ANGLES), feeds).largest.max() <= 2**-11


def test_activations_of_8_bits_become_the_same_integers() -> None:
    model = ir.from_proto(onnx.parser.parse_model(PRODUCT))
    product = model.graph[0]
    product.replace_input_with(0, rounded(model.graph, product, product.inputs[0], 64, 16))
    hidden = HIDDEN.astype(ml_dtypes.bfloat16).astype(np.float32)
    of_product = noise(to_proto(model), {"hidden": hidden, "weight": WEIGHT}, ("weight",))
    assert of_product.largest.max() <= 2**-11, "the product alone is rounded"


def test_an_output_that_is_rounded_passes_and_one_that_is_a_little_wrong_does_not() -> None:
    exact = HIDDEN @ WEIGHT.T
    model = onnx.parser.parse_model(PRODUCT)
    bound = beside_graph(Tolerances("bf16"), noise(model, {"hidden": HIDDEN, "weight": WEIGHT}, ("weight",)))
    engine = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert wrong("out", measure(exact, engine, bound)) is None
    assert "an rms error" in (wrong("out", measure(exact, engine * np.float32(1.01), bound)) or "")


def test_products_of_experts_are_as_exact_as_in_w8a16_and_a_lookup_as_exact_as_before() -> None:
    """No precision rounds the activations of experts to 8 bits: engines cut them into two numbers."""
    lookup = onnx.helper.make_node("GatherBlockQuantized", ["codes", "ids", "scales"], ["weight"])
    product = onnx.helper.make_node("MatMul", ["weight", "hidden"], ["out"])
    tolerances = Tolerances("w4a8", "onnxruntime")
    for nodes, expected in (([lookup, product], (2.0, 2**-2)), ([lookup], (2.0, 2**-8)), ([product], (2.0, 2**-8))):
        model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "block", [], []))
        assert tolerances_of(model, tolerances).engine == expected
