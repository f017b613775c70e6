"""The attention of rows that decode, as one node over the caches as they lie.

In: a decode graph; out: one whose products, mask and softmax are ONNX Runtime's `GroupQueryAttention`, which reads the
keys and values that a row holds, where the graph's own nodes read the row's whole capacity. Each row is computed alone,
one head after another, so its bits do not depend on the others. RoPE stays as it is.

The operator puts the new key and value into the caches that it reads: `present_key` and `present_value` are to be bound
to these, at whose end there must be room for a token. What the graph gave, it still gives.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.metrics import REWRITE_TOLERANCE, max_abs_error, peak
from lockstep.onnx_tools.rewriter import Rewriter, dims_of, upstream
from lockstep.onnx_tools.sessions import compute

_DOMAIN = "com.microsoft"
_VECTOR = 8  # the operator takes heads of a multiple of it
PRESENT = {"present_key": "past_key", "present_value": "past_value"}
# what export/attention.py has behind RoPE in float32; others have a window, a cap or sinks
_PLAIN = [
    *("Add", "Concat", "Gather", "Less", "MatMul", "MatMul", "MatMul", "Mul", "Mul", "Range", "Reshape", "Reshape"),
    *("Shape", "Slice", "Slice", "Softmax", "Transpose", "Transpose", "Unsqueeze", "Unsqueeze", "Unsqueeze"),
    *("Unsqueeze", "Where"),
]


def grouped_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a decode graph of plain float32 attention with it in one node; any other model itself."""
    graph = Rewriter(model)
    if not {*PRESENT.values()} <= graph.inputs.keys() or graph.element("past_key") != TensorProto.FLOAT:
        return model
    requests, kv_heads, _, dim = graph.shape("past_key")
    if requests or graph.shape("past_value")[3] != dim or dim % _VECTOR:  # a prompt's is one request's
        return model
    scaled = _scaled_query(graph, [-1, kv_heads, dim])
    if scaled is None:
        return model
    query, group, scale = scaled
    kept = upstream(graph.nodes, ("key_out", "value_out", query))
    replaced = [node for node in graph.nodes if not kept.intersection(node.output)]
    if sorted(node.op_type for node in replaced) != _PLAIN:
        return model
    heads = group * kv_heads

    def constant(name: str, *values: int) -> str:
        return graph.constant(f"grouped/{name}", np.array(values, np.int64))

    one = graph.constant("grouped/one", np.array(1, np.int32))
    of_heads = ("query", query, heads), ("key", "key_out", kv_heads), ("value", "value_out", kv_heads)
    for name, source, count in of_heads:
        shape = constant(f"{name}_shape", -1, 1, count * dim)
        graph.append(helper.make_node("Reshape", [source, shape], [f"grouped/{name}"]))
    graph.append(
        helper.make_node("Cast", ["past_lengths"], ["grouped/lengths"], to=TensorProto.INT32),
        helper.make_node("ReduceMax", ["grouped/lengths"], ["grouped/longest"], keepdims=0),
        helper.make_node("Add", ["grouped/longest", one], ["grouped/total"]),
        helper.make_node(
            "GroupQueryAttention",
            ["grouped/query", "grouped/key", "grouped/value", *PRESENT.values(), "grouped/lengths", "grouped/total"],
            ["grouped/attention", *PRESENT], domain=_DOMAIN, num_heads=heads, kv_num_heads=kv_heads, scale=scale,
        ),
        helper.make_node("Reshape", ["grouped/attention", constant("flat", -1, heads * dim)], ["attention"]),
    )  # fmt: skip
    for name, past in PRESENT.items():
        graph.outputs[name] = helper.make_tensor_value_info(name, TensorProto.FLOAT, dims_of(graph.inputs[past]))
    for old in replaced:
        graph.replace(old)
    graph.model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))  # a graph of plain attention has none
    fused = graph.finish()
    return fused if _is_same(model, fused) else model


def _is_same(model: onnx.ModelProto, fused: onnx.ModelProto) -> bool:
    """Return whether both give the same on random numbers: axes and factors in the model may be others."""
    from lockstep.onnx_tools.prepare import decode_inputs  # needed only where engines are built

    feeds = decode_inputs(model, np.array([0, 3, 6]), 7)
    expected, found = compute(model, feeds), compute(fused, feeds)
    tolerance = REWRITE_TOLERANCE["float32"]
    return all(max_abs_error(array, found[name]) <= tolerance * peak(array) for name, array in expected.items())


def _scaled_query(graph: Rewriter, groups: list[int]) -> tuple[str, int, float] | None:
    """Return the rotated query, which is scaled and put into `groups`, the size of a group, and the scale.

    groups: [-1, kv_heads, dim] of [-1, kv_heads, group, dim].
    """
    for node in graph.nodes:
        shape = graph.array(node.input[1]) if node.op_type == "Reshape" else None
        product = graph.producers.get(node.input[0])
        if shape is None or len(shape) != 4 or [*shape[:2], shape[3]] != groups or product is None:
            continue
        scale = graph.array(product.input[1]) if product.op_type == "Mul" else None
        if scale is not None and scale.size == 1:
            return product.input[0], int(shape[2]), float(scale)
    return None
