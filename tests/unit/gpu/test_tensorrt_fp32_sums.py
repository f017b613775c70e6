"""Products of fp16 numbers get casts around them, and the graph computes the same numbers as before."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.sessions import compute
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.onnx_tools.types import typed_values
from lockstep_gpu.backends.tensorrt.fp32_sums import Fp32Sums

GRAPH = """<ir_version: 8, opset_import: ["": 20]>
g (TYPE[num_tokens, 512] hidden, TYPE[32, 512] weight, TYPE[32] bias, TYPE[32, 8] other) => (TYPE[num_tokens, 8] out, TYPE[num_tokens, 32] both)
{ both = Gemm<transB = 1>(hidden, weight, bias)  out = MatMul(both, other) }"""  # noqa: E501


def graph(dtype: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(GRAPH.replace("TYPE", dtype))


def test_products_are_in_fp32_and_all_that_the_graph_names_is_in_fp16() -> None:
    model = run_passes(graph("float16"), Fp32Sums())
    types = {name: element for name, (element, _) in typed_values(model).items()}
    products = [node for node in model.graph.node if node.op_type in ("Gemm", "MatMul")]
    assert [node.op_type for node in products] == ["Gemm", "MatMul"]
    for node in products:
        assert len(node.input) == 2  # the bias is added to the rounded product
        assert {types[name] for name in (*node.input, *node.output)} == {onnx.TensorProto.FLOAT}
    assert {types[name] for name in ("hidden", "weight", "bias", "both", "out")} == {onnx.TensorProto.FLOAT16}


def test_results_are_fp32_sums_that_are_rounded() -> None:
    model = graph("float16")
    feeds = random_inputs(model)
    actual = compute(run_passes(model, Fp32Sums()), feeds)
    hidden, weight, bias = (feeds[name].astype(np.float64) for name in ("hidden", "weight", "bias"))
    exact = hidden @ weight.T + bias
    assert np.abs(actual["both"] - exact).max() <= np.abs(exact).max() * 2**-11  # half a unit of the last place
    assert np.abs(actual["out"] - actual["both"].astype(np.float64) @ feeds["other"]).max() < 1e-2


@pytest.mark.parametrize("dtype", ["float", "bfloat16"])
def test_other_precisions_are_left_as_they_are(dtype: str) -> None:
    """TensorRT has no kernels that accumulate in bf16."""
    model = graph(dtype)
    assert run_passes(model, Fp32Sums()) is model
