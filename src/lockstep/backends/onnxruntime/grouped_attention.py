"""Attention in one node.

In: a decode or prefill graph; out: one whose products, mask and softmax are ONNX Runtime's `GroupQueryAttention`. It
computes one head after another, so a request's bits do not depend on others.

Rows that decode: the operator reads the keys and values that a row holds, where the graph's own nodes read the row's
whole capacity. It puts the new key and value into the caches that it reads: `present_key` and `present_value` are to be
bound to these, at whose end there must be room for a token. What the graph gave, it still gives. RoPE that turns halves
is `RotaryEmbedding`, on the graph's own cosines and sines; other RoPE stays as it is.

A prompt, whose RoPE stays as it is: the softmax reads no masked scores. In the library's other kernels their
exponentials are denormal numbers, which take ten times as long as others. Its tiled kernel is one of these; it is not
chosen where heads have sinks, so each gets one that weighs nothing.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.onnx_tools.rewriter import Rewriter, dims_of, upstream
from lockstep.onnx_tools.sessions import compute
from lockstep.tolerances import REWRITE

_DOMAIN = "com.microsoft"
_VECTOR = 8  # the operator takes heads of a multiple of it
PRESENT = {"present_key": "past_key", "present_value": "past_value"}
# what export/attention.py has behind RoPE in float32; others have a window, a cap or sinks
_DECODE = [
    *("Add", "Concat", "Gather", "Less", "MatMul", "MatMul", "MatMul", "Mul", "Mul", "Range", "Reshape", "Reshape"),
    *("Shape", "Slice", "Slice", "Softmax", "Transpose", "Transpose", "Unsqueeze", "Unsqueeze", "Unsqueeze"),
    *("Unsqueeze", "Where"),
]
_PREFILL = [
    *("Concat", "Concat", "Concat", "Gather", "GreaterOrEqual", "Less", "MatMul", "MatMul", "Mul", "Range", "Reshape"),
    *("Reshape", "Shape", "Softmax", "Sub", "Transpose", "Transpose", "Transpose", "Transpose", "Transpose"),
    *("Transpose", "Unsqueeze", "Unsqueeze", "Unsqueeze", "Unsqueeze", "Where", "Where"),
]
_NO_SINK = -3e38


def past_of(output: str) -> str | None:
    """Return the input that an output is to be bound to, of an engine or of several in one graph; None for others."""
    *prefix, name = output.split(".")
    return ".".join([*prefix, PRESENT[name]]) if name in PRESENT else None


def grouped_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph of plain float32 attention over a cache with it in one node; any other model itself."""
    for with_rope in (True, False):
        fused = _fused(model, with_rope)
        if fused is not None and _is_same(model, fused):
            return fused
    return model


def _fused(model: onnx.ModelProto, with_rope: bool) -> onnx.ModelProto | None:
    graph = Rewriter(model)
    if not {*PRESENT.values()} <= graph.inputs.keys() or graph.element("past_key") != TensorProto.FLOAT:
        return None
    requests, kv_heads, _, dim = graph.shape("past_key")
    if graph.shape("past_value")[3] != dim or dim % _VECTOR:
        return None
    decodes = not requests  # a prompt's is one request's
    scaled = _scaled_query(graph, [-1, kv_heads, dim])
    if scaled is None:
        return None
    query, group, scale = scaled
    kept = upstream(graph.nodes, ("key_out", "value_out", query))
    replaced = [node for node in graph.nodes if not kept.intersection(node.output)]
    if sorted(node.op_type for node in replaced) != (_DECODE if decodes else _PREFILL):
        return None
    heads = group * kv_heads

    def constant(name: str, *values: int) -> str:
        return graph.constant(f"grouped/{name}", np.array(values, np.int64))

    tables = _tables(graph, query) if with_rope and decodes else None
    if with_rope and (tables is None or tables != _tables(graph, "key_out")):
        return None
    one = graph.constant("grouped/one", np.array(1, np.int32))
    tokens = [-1, 1] if decodes else [1, -1]  # [batch, tokens]
    given = []
    for name, rotated, count in (
        ("query", query, heads),
        ("key", "key_out", kv_heads),
        ("value", "value_out", kv_heads),
    ):
        source = rotated if tables is None else name
        shape = constant(f"{name}_shape", *tokens, count * dim)
        graph.append(helper.make_node("Reshape", [source, shape], [f"grouped/{name}"]))
        given.append(f"grouped/{name}")
    if tables is not None:
        given[:2] = _rotate(graph, given[:2], *tables)
        graph.replace(graph.producers["key_out"])
        graph.append(helper.make_node("Reshape", [given[1], constant("key_heads", -1, kv_heads, dim)], ["key_out"]))
    graph.append(helper.make_node("Cast", ["past_lengths"], ["grouped/lengths"], to=TensorProto.INT32))
    if decodes:
        last = "grouped/lengths"
        sinks = []
        pasts = [*PRESENT.values()]
        present = [*PRESENT]
        for name, past in PRESENT.items():
            graph.outputs[name] = helper.make_tensor_value_info(name, TensorProto.FLOAT, dims_of(graph.inputs[past]))
    else:
        last = "grouped/last"
        pasts = [f"grouped/{past}" for past in PRESENT.values()]
        present = [f"grouped/{name}" for name in PRESENT]
        sinks = [*[""] * 4, graph.constant("grouped/sinks", np.full(heads, _NO_SINK, np.float32))]
        graph.append(
            helper.make_node("Shape", ["grouped/key"], ["grouped/shape"], start=1, end=2),
            helper.make_node("Cast", ["grouped/shape"], ["grouped/count"], to=TensorProto.INT32),
            helper.make_node("Sub", ["grouped/count", one], ["grouped/before_last"]),
            helper.make_node("Add", ["grouped/lengths", "grouped/before_last"], [last]),
        )
        ends = constant("zero", 0), "past_lengths", constant("axis", 2)
        for name in PRESENT.values():
            graph.append(helper.make_node("Slice", [name, *ends], [f"grouped/{name}"]))
    graph.append(
        helper.make_node("ReduceMax", [last], ["grouped/longest"], keepdims=0),
        helper.make_node("Add", ["grouped/longest", one], ["grouped/total"]),
        helper.make_node(
            "GroupQueryAttention",
            [*given, *pasts, last, "grouped/total", *sinks],
            ["grouped/attention", *present], domain=_DOMAIN, num_heads=heads, kv_num_heads=kv_heads, scale=scale,
        ),
        helper.make_node("Reshape", ["grouped/attention", constant("flat", -1, heads * dim)], ["attention"]),
    )  # fmt: skip
    for old in replaced:
        graph.replace(old)
    graph.model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))  # a graph of plain attention has none
    fused = graph.finish()
    del fused.graph.input[:]
    fused.graph.input.extend(model.graph.input)  # without RoPE only the mask reads positions
    return fused


def _rotate(graph: Rewriter, values: list[str], cosines: str, sines: str, twice: str) -> list[str]:
    """Add a node for the RoPE of each value, [num_requests, 1, heads * dim]; return the results.

    The rest is what `_tables` gives.
    """
    (concat,) = (node for node in graph.nodes if node.output[0] == twice)
    graph.replace(concat, helper.make_node("Identity", concat.input[:1], [twice]))  # each angle stands there once
    numbers = {"zero": np.array(0), "one": np.array(1), "axis": np.array([1])}
    zero, one, axis = (graph.constant(f"rope/{name}", number) for name, number in numbers.items())
    graph.append(
        helper.make_node("Size", ["position_ids"], ["rope/count"]),
        helper.make_node("Range", [zero, "rope/count", one], ["rope/range"]),
        helper.make_node("Unsqueeze", ["rope/range", axis], ["rope/rows"]),  # each request has its row of the tables
        *(
            helper.make_node(
                "RotaryEmbedding", [value, "rope/rows", cosines, sines], [f"{value}/turned"], domain=_DOMAIN
            )
            for value in values
        ),
    )
    return [f"{value}/turned" for value in values]


def _tables(graph: Rewriter, rotated: str) -> tuple[str, str, str] | None:
    """Return the cosines and sines of a rotated value, and their angles; None without any."""
    total = graph.producers.get(graph.producers[rotated].input[0])  # before it is transposed
    products = [graph.producers.get(name) for name in total.input] if total is not None else []
    tables: dict[str, tuple[str, str]] = {}
    for name in (name for product in products if product is not None for name in product.input):
        table = graph.producers.get(name)
        if table is None or table.op_type != "Unsqueeze":
            continue
        values = upstream(graph.nodes, table.input[:1])
        made = [node for node in graph.nodes if values.intersection(node.output)]
        twice = [node.output[0] for node in made if node.op_type == "Concat" and node.input[0] == node.input[-1]]
        functions = [node.op_type for node in made if node.op_type in ("Cos", "Sin")]
        if len(functions) == len(twice) == 1:
            tables[functions[0]] = table.input[0], twice[0]
    if len(tables) < 2 or tables["Cos"][1] != tables["Sin"][1]:
        return None
    return tables["Cos"][0], tables["Sin"][0], tables["Cos"][1]


def _is_same(model: onnx.ModelProto, fused: onnx.ModelProto) -> bool:
    """Return whether both give the same on random numbers: axes and factors in the model may be others."""
    from lockstep.onnx_tools.prepare import decode_inputs, random_inputs  # needed only where engines are built

    decodes = fused.graph.output[-1].name in PRESENT
    feeds = decode_inputs(model, np.array([0, 3, 6]), 7) if decodes else random_inputs(model)
    expected = compute(model, feeds)
    found = compute(fused, feeds)
    bound = Bound(REWRITE["float32"])
    return not any(wrong(name, measure(array, found[name], bound, peak(array))) for name, array in expected.items())


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
