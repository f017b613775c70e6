"""Attention in one node.

In: a decode or prefill graph; out: one whose products, mask and softmax are ONNX Runtime's `GroupQueryAttention`. It
computes one head after another, so a request's bits do not depend on others.

Decode: the operator reads only the cached tokens of a row, where the graph's own nodes read the row's whole capacity.
It writes the new key and value into the caches that it reads: bind the outputs `present_key` and `present_value` to
these inputs, with room for one more token. The graph keeps its other outputs. RoPE by halves becomes `RotaryEmbedding`,
on the graph's own cosines and sines; other RoPE does not change.

Prefill, whose RoPE does not change: the softmax reads no masked scores. In the graph's own softmax, and in the
library's tiled kernel of this operator, the exponentials of masked scores are denormal numbers, which take ten times as
long. The tiled kernel is not chosen where heads have sinks, so each head gets a sink whose weight is 0.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from lockstep.backends.onnxruntime.decode_layers import PRESENT
from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.onnx_tools.sessions import compute
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, remove_unused, to_proto
from lockstep.onnx_tools.values import array_of, maker, required, sizes_of, upstream
from lockstep.tolerances import REWRITE

_DOMAIN = "com.microsoft"
_VECTOR = 8  # the operator takes heads of a multiple of it
# The operators that export/attention.py writes after RoPE, for float32; other attention has a window, a cap or sinks.
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


class GroupedAttention(Pass):
    """Put plain float32 attention over a cache into one node."""

    def call(self, model: ir.Model) -> PassResult:
        # The pattern says which operators there are, not how they are wired, so a fused copy is compared with the graph
        # on random numbers before the graph itself is changed. With RoPE inside the node first: it is faster.
        for with_rope in (True, False):
            fused = model.clone()
            if not _fuse(fused, with_rope):
                continue
            remove_unused(fused.graph)
            if _is_same(to_proto(model), to_proto(fused)):
                return PassResult(model, _fuse(model, with_rope))
        return PassResult(model, False)


def _fuse(model: ir.Model, with_rope: bool) -> bool:
    """Put attention into one node; return False if its operators are not those of plain attention."""
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    if not {*PRESENT.values()} <= inputs.keys() or inputs["past_key"].dtype != ir.DataType.FLOAT:
        return False
    requests, kv_heads, _, dim = sizes_of(inputs["past_key"])
    if sizes_of(inputs["past_value"])[3] != dim or dim % _VECTOR:
        return False
    decodes = not requests  # `num_requests`, which is dynamic; the cache of a prompt is one request's
    scaled = _scaled_query(graph, [-1, kv_heads, dim])
    if scaled is None:
        return False
    query, group, scale = scaled
    key_out = outputs["key_out"]
    outside = upstream((key_out, outputs["value_out"], query))
    replaced = sorted(node.op_type for node in graph if outside.isdisjoint(node.outputs))
    if replaced != (_DECODE if decodes else _PREFILL):
        return False
    heads = group * kv_heads
    tables = None
    if with_rope:
        tables = _tables(query) if decodes else None
        if tables is None or tables != _tables(key_out):
            return False
    writer = GraphWriter(graph, "grouped")
    constant_one = np.array(1, np.int32)
    tokens = [-1, 1] if decodes else [1, -1]  # [batch, tokens]
    sources = [query, key_out, outputs["value_out"]]
    if tables is not None:
        sources = [inputs["query"], inputs["key"], inputs["value"]]
    counts = (heads, kv_heads, kv_heads)
    rows = [writer.op("Reshape", source, [*tokens, count * dim]) for source, count in zip(sources, counts)]
    if tables is not None:
        rows[:2] = _rotate(writer, inputs["position_ids"], rows[:2], *tables)
        writer.op("Reshape", rows[1], [-1, kv_heads, dim], replaces=key_out)
    last = writer.op("Cast", inputs["past_lengths"], to=ir.DataType.INT32)  # the last token's index in each cache
    present: list[str] = [*PRESENT]
    pasts = [inputs[past] for past in PRESENT.values()]
    sinks: list[np.ndarray | None] = []
    if not decodes:
        # Of a prompt's cache the operator must read only the tokens in use, and its outputs are not used.
        count = writer.op("Cast", writer.op("Shape", rows[1], start=1, end=2), to=ir.DataType.INT32)
        last = writer.op("Add", last, writer.op("Sub", count, constant_one))
        pasts = [writer.op("Slice", past, [0], inputs["past_lengths"], [2]) for past in pasts]
        present = [f"grouped/{name}" for name in PRESENT]
        sinks = [*[None] * 4, np.full(heads, _NO_SINK, np.float32)]
    total = writer.op("Add", writer.op("ReduceMax", last, keepdims=0), constant_one)
    attention, *present_values = writer.several(
        "GroupQueryAttention",
        *(*rows, *pasts, last, total, *sinks),
        results=["grouped/attention", *present],
        domain=_DOMAIN,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=scale,
    )
    writer.op("Reshape", attention, [-1, heads * dim], replaces=outputs["attention"])
    if decodes:
        for value, past in zip(present_values, pasts, strict=True):
            value.type = past.type
            value.shape = past.shape
            graph.outputs.append(value)
    model.opset_imports[_DOMAIN] = 1  # a graph of plain attention has none
    return True


_Tables = tuple[ir.Value, ir.Value, ir.Node]


def _rotate(
    writer: GraphWriter, positions: ir.Value, values: list[ir.Value], cosines: ir.Value, sines: ir.Value, twice: ir.Node
) -> list[ir.Value]:
    """Add a node for the RoPE of each value, [num_requests, 1, heads * dim]; return the results.

    cosines, sines, twice: see `_tables`.
    """
    # The graph repeats the angles for both halves of a head; the operator takes each angle once.
    GraphWriter(writer.graph, before=twice).op("Identity", twice.inputs[0], replaces=twice.outputs[0])
    # The graph computes the cosines of each request's position, so row i of the tables is of request i.
    count = writer.op("Size", positions)
    numbers = writer.op("Range", np.array(0), count, np.array(1))
    rows = writer.op("Unsqueeze", numbers, [1])
    return [writer.op("RotaryEmbedding", value, rows, cosines, sines, domain=_DOMAIN) for value in values]


def _tables(rotated: ir.Value) -> _Tables | None:
    """Return the cosines and sines of a rotated value, and the node that repeats their angles; None without any."""
    # The value is Transpose(Add(Mul(x, Unsqueeze(cosines)), Mul(halves of x, Unsqueeze(sines)))).
    transpose = required(rotated.producer())
    total = required(transpose.inputs[0]).producer()
    if total is None:
        return None
    tables: dict[str, tuple[ir.Value, ir.Node]] = {}
    for summand in total.inputs:
        product = maker(summand, "Mul")
        if product is None:
            continue
        for value in product.inputs:
            table = maker(value, "Unsqueeze")
            if table is None:
                continue
            source = required(table.inputs[0])
            producers = {step.producer() for step in upstream([source])}
            nodes = [node for node in producers if node is not None]
            # RoPE rotates the halves of a head by the same angles: Concat(angles, angles).
            repeats = [node for node in nodes if node.op_type == "Concat" and node.inputs[0] is node.inputs[-1]]
            functions = [node.op_type for node in nodes if node.op_type in ("Cos", "Sin")]
            if len(functions) == 1 and len(repeats) == 1:
                tables[functions[0]] = source, repeats[0]
    if len(tables) < 2 or tables["Cos"][1] is not tables["Sin"][1]:
        return None
    return tables["Cos"][0], tables["Sin"][0], tables["Cos"][1]


def _is_same(model: onnx.ModelProto, fused: onnx.ModelProto) -> bool:
    """Return whether both give the same outputs on random numbers, within the error of another order of sums."""
    from lockstep.onnx_tools.prepare import decode_inputs, random_inputs  # needed only where engines are built

    if fused.graph.output[-1].name in PRESENT:
        feeds = decode_inputs(model, np.array([0, 3, 6]), 7)
    else:
        feeds = random_inputs(model)
    expected = compute(model, feeds)
    outputs = compute(fused, feeds)
    bound = Bound(REWRITE["float32"])
    return not any(wrong(name, measure(array, outputs[name], bound, peak(array))) for name, array in expected.items())


def _scaled_query(graph: ir.Graph, groups: list[int]) -> tuple[ir.Value, int, float] | None:
    """Return (rotated query, number of query heads of a key, scale); None without such a query.

    Matches Reshape(query * scale, [-1, kv_heads, group, dim]); groups: [-1, kv_heads, dim].
    """
    for node in graph:
        if node.op_type != "Reshape":
            continue
        shape = array_of(node.inputs[1])
        if shape is None or len(shape) != 4 or [*shape[:2], shape[3]] != groups:
            continue
        product = maker(node.inputs[0], "Mul")
        if product is None:
            continue
        scale = array_of(product.inputs[1])
        if scale is not None and scale.size == 1:
            return required(product.inputs[0]), int(shape[2]), float(scale)
    return None
