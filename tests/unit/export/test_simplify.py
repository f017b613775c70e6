"""Packing must never change what a graph computes, whatever the leading 1 means."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from lockstep.export.simplify import pack
from lockstep.onnx_tools.sessions import open_session

N = 5
H = 2
D = 4
GRAPHS = {
    "elementwise with scalar and vector": "y = Mul(x, s)  r = Add(y, v)",
    "elementwise with a constant that leads with 1": "r = Add(x, lead)",
    "elementwise with a higher rank": "a = Unsqueeze(x, axis1)  b = Add(a, x)  r = Tanh(b)",
    "reduction over the last axis": "m = ReduceMean(x, minus1)  r = Sub(x, m)",
    "reduction over a positive axis": "m = ReduceMean(x, axis2)  r = Sub(x, m)",
    "reduction over the leading axis": "m = ReduceSum(x, axis0)  r = Sub(x, m)",
    "softmax over tokens": "r = Softmax <axis = 1> (x)",
    "softmax over the leading axis": "r = Softmax <axis = 0> (x)",
    "heads and back": "a = Reshape(x, heads)  b = Transpose <perm = [0, 2, 1, 3]> (a)  c = Transpose <perm = "
    "[0, 2, 1, 3]> (b)  r = Reshape(c, flat)",
    "transpose of the leading axis": "r = Transpose <perm = [1, 0, 2]> (x)",
    "rows and back": "a = Reshape(x, rows)  b = MatMul(a, w)  r = Reshape(b, flat)",
    "matmul with a weight": "r = MatMul(x, w)",
    "matmul of two that lead": "t = Transpose <perm = [0, 2, 1]> (x)  r = MatMul(x, t)",
    "slice and concat": "a = Slice(x, axis0, axis2, minus1)  b = Slice(x, axis2, big, minus1)  n = Neg(b)  r "
    "= Concat <axis = -1> (n, a)",
    "slice of the leading axis": "r = Slice(x, axis0, axis1, axis0)",
    "concat over the leading axis": "r = Concat <axis = 0> (x, x)",
    "split over heads": "a, b = Split <axis = 2, num_outputs = 2> (x)  r = Mul(a, b)",
    "unsqueeze in the middle and at the front": "a = Unsqueeze(x, axis1)  b = Unsqueeze(x, axis0)  r = Add(a, b)",
    "gather of the leading axis": "y = Relu(x)  r = Gather <axis = 0> (y, zero)",
    "gather of tokens": "y = Relu(x)  r = Gather <axis = 1> (y, axis1)",
    "an operator without a rule": "r = CumSum(x, one)",
    "where with a mask": "m = Greater(x, s)  r = Where(m, x, s)",
    "reshape that copies dimensions": "a = Reshape(x, copies)  r = Relu(a)",
}
CONSTANTS = {
    "s": np.float32(0.5), "v": np.linspace(-1, 1, H * D, dtype=np.float32),
    "lead": np.arange(N * H * D, dtype=np.float32).reshape(1, N, H * D),
    "w": np.linspace(-1, 1, (H * D) ** 2, dtype=np.float32).reshape(H * D, H * D), "minus1": np.array([-1]),
    "axis0": np.array([0]), "axis1": np.array([1]), "axis2": np.array([2]), "big": np.array([2**40]),
    "heads": np.array([1, -1, H, D]), "flat": np.array([1, -1, H * D]), "rows": np.array([-1, H * D]),
    "zero": np.int64(0), "one": np.int64(1), "copies": np.array([0, 0, H, D]),
}  # fmt: skip


def build(body: str) -> onnx.ModelProto:
    text = (
        f'<ir_version: 10, opset_import: ["": 20]> g (float[num_tokens, {H * D}] hidden) => (float r) {{ '
        f"x = Unsqueeze(hidden, axis0) {body} }}"
    )
    model = onnx.parser.parse_model(text)
    for name, value in CONSTANTS.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def run(model: onnx.ModelProto) -> np.ndarray:
    session = open_session(model.SerializeToString())
    hidden = np.random.default_rng(0).standard_normal((N, H * D), dtype=np.float32)
    return session.run(None, {"hidden": hidden})[0]


@pytest.mark.parametrize("body", GRAPHS.values(), ids=GRAPHS.keys())
def test_packed_graph_gives_the_same_bytes(body):
    model = build(body)
    packed = ir.to_proto(pack(ir.from_proto(model)))
    onnx.checker.check_model(packed, full_check=True)
    np.testing.assert_array_equal(run(packed), run(model))  # movement only: not one bit may differ


@pytest.mark.parametrize(
    "name",
    ["heads and back", "rows and back", "reduction over the last axis", "slice and concat", "matmul with a weight"],
)
def test_no_leading_one_is_left_inside(name):
    packed = pack(ir.from_proto(build(GRAPHS[name])))
    *inner, _ = packed.graph
    assert not [value.name for node in inner for value in node.outputs if len(value.shape) > 1 and value.shape[0] == 1]
