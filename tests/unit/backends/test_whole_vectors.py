"""Functions and sums of rows: the same values, whatever number of rows they are computed with."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from lockstep.backends.onnxruntime.fixed_sums import FixSums
from lockstep.backends.onnxruntime.whole_vectors import PadAngles
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.toolkit import run_passes

FUNCTIONS = {"Cos": np.cos, "Sin": np.sin, "Log": np.log, "Softplus": lambda x: np.log1p(np.exp(x)), "Atan": np.arctan}


def model_of(nodes, ios, constants=()):
    graph = helper.make_graph(nodes, "rows", ios[:1], ios[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def graph(shape, operators=("Cos", "Sin")):
    """Functions of 2 x."""
    nodes = [helper.make_node("Add", ["x", "x"], ["angles"])]
    nodes += [helper.make_node(name, ["angles"], [name.lower()]) for name in operators]
    names = ("x", *(name.lower() for name in operators))
    return model_of(nodes, [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]) for name in names])


def rows_differ(model, shape, expected):
    session = open_session(model.SerializeToString(), 1)
    x = np.random.default_rng(0).uniform(0.1, 30, (64, *shape)).astype(np.float32)
    batched = session.run(None, {"x": x})
    for result, values in zip(batched, expected(x), strict=True):
        np.testing.assert_allclose(result, values, rtol=1e-5, atol=1e-6)  # of sums of float32 in another order
    for count in (1, 2, 3):
        for row in range(64 - count):
            rows = session.run(None, {"x": x[row : row + count].copy()})
            if not all(np.array_equal(item, full[row : row + count]) for item, full in zip(rows, batched)):
                return True
    return False


@pytest.mark.parametrize("shape", [(), (1,), (3,), (6,), (9,)], ids=str)
def test_a_row_has_the_same_bits_alone(shape):
    model = graph(shape, FUNCTIONS)

    def expected(x: np.ndarray) -> list[np.ndarray]:
        return [function(2 * x) for function in FUNCTIONS.values()]

    assert rows_differ(model, shape, expected)  # when this fails, ONNX Runtime needs no help any more
    assert not rows_differ(run_passes(model, PadAngles()), shape, expected)


@pytest.mark.parametrize("size", [4, 20, 40, 128])
def test_whole_vectors_stay_as_they_are(size):
    model = graph((size,))
    before = model.SerializeToString()
    assert run_passes(model, PadAngles()) is model and model.SerializeToString() == before
    assert not rows_differ(model, (size,), lambda x: [np.cos(2 * x), np.sin(2 * x)])


def sums(shape, axes, keepdims, operator="ReduceSum"):
    ios = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape])]
    rank = 1 + len(shape) - (0 if keepdims else len(axes))
    ios.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank))
    axes = numpy_helper.from_array(np.array(axes, np.int64), "axes")
    return model_of([helper.make_node(operator, ["x", "axes"], ["y"], keepdims=keepdims)], ios, [axes])


# Router weights by experts of a token as published (6 DeepSeek-V3, ERNIE 4.5, Nemotron-H; 10 Qwen3-Next; 5 and 7 of
# Qwen3 MoE as people cut it), what experts give, and sums of several axes.
WRONG = [((count,), [-1]) for count in (5, 6, 7, 9, 10, 22)]
WRONG += [((6, 64), [1]), ((10, 7), [1]), ((16, 4), [-2]), ((3, 7), [2]), ((3, 5), [1, 2]), ((6, 3, 4), [1])]
RIGHT = [((count,), [-1]) for count in (1, 2, 3, 4, 8, 12, 16, 64, 128)]
RIGHT += [((2, 64), [1]), ((4, 7), [1]), ((5, 64), [1]), ((3, 8), [2]), ((5, 4), [1, 2])]


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize(("shape", "axes"), WRONG, ids=str)
def test_a_sum_has_the_same_bits_wherever_its_row_lies(shape, axes, operator):
    for keepdims in (0, 1):
        model = sums(shape, axes, keepdims, operator)
        function = np.sum if operator == "ReduceSum" else np.mean
        options = {"axis": tuple(axes), "keepdims": bool(keepdims)}
        for is_fixed in (False, True):  # as above
            fixed = run_passes(model, FixSums()) if is_fixed else model
            are_different = rows_differ(fixed, shape, lambda x: [function(x.astype(np.float64), **options)])
            assert are_different != is_fixed


@pytest.mark.parametrize(("shape", "axes"), RIGHT, ids=str)
def test_sums_in_one_order_stay_as_they_are(shape, axes):
    model = sums(shape, axes, 1)
    before = model.SerializeToString()
    assert run_passes(model, FixSums()) is model and model.SerializeToString() == before
    assert not rows_differ(model, shape, lambda x: [x.astype(np.float64).sum(tuple(axes), keepdims=True)])
