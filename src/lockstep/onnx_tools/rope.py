"""RoPE of an attention variant alone, for a backend that has attention of its own.

In: an attention variant and its decode graph. Out: a graph query, key, position_ids -> query_out [num_tokens,
num_heads, head_dim], key_out [num_tokens, num_kv_heads, head_dim], cut out of it. That what is left is plain attention
of the variant's numbers is shown by running the decode graph beside the cut-out graph with attention written in NumPy
behind it. It runs on the host in ONNX Runtime, so a bf16 graph is cut in fp32.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx
from onnx import helper

from lockstep.artifacts.assembly import AttentionVariant
from lockstep.errors import CheckError
from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.onnx_tools.rewriter import Rewriter
from lockstep.onnx_tools.widened import widened
from lockstep.tolerances import REWRITE

_CAPACITY = 7
_BF16 = 2**-7  # its eps


def rotary(decode: onnx.ModelProto, variant: AttentionVariant) -> onnx.ModelProto:
    """Cut RoPE out of a decode graph. Raises CheckError where the graph is not RoPE and then attention."""
    wide = widened(decode)
    graph = Rewriter(wide)
    query, scale = _rotated_query(graph, variant, None if wide is decode else _BF16)
    graph.append(helper.make_node("Identity", [query], ["query_out"], name="query_out"))
    for value in graph.inputs.values():
        value.type.tensor_type.shape.dim[0].dim_param = "num_tokens"
    element = graph.outputs["key_out"].type.tensor_type.elem_type  # queries and keys may come in float32
    graph.outputs = {
        name: helper.make_tensor_value_info(name, element, ["num_tokens", heads, variant.head_dim])
        for name, heads in (("query_out", variant.num_heads), ("key_out", variant.num_kv_heads))
    }
    graph.model.graph.name = "rotary"
    cut = graph.finish()
    _check(wide, cut, dataclasses.replace(variant, scale=scale))
    return cut


def _rotated_query(graph: Rewriter, variant: AttentionVariant, eps: float | None) -> tuple[str, float]:
    """Return the name of the value that attention scales, and the scale.

    The value is what a product with the variant's scale reads, whose result is brought into groups of heads. The scale
    is as the graph has it, rounded to its type; `eps` is that of the type unless given. Raises CheckError where there
    is no such product, or more than one.
    """
    groups = [-1, variant.num_kv_heads, variant.num_heads // variant.num_kv_heads, variant.head_dim]
    scaled = []
    for node in graph.nodes:
        factors = {name: array for name in node.input if (array := graph.array(name)) is not None and not array.shape}
        readers = graph.consumers.get(node.output[0], [])
        if node.op_type == "Mul" and len(factors) == 1 and len(readers) == 1 and readers[0].op_type == "Reshape":
            ((factor, array),) = factors.items()
            shape = graph.array(readers[0].input[1])
            rounding = (eps or np.finfo(array.dtype).eps) / 2
            is_scale = math.isclose(float(array), variant.scale, rel_tol=rounding)
            if shape is not None and shape.tolist() == groups and is_scale:
                scaled.append((next(name for name in node.input if name != factor), float(array)))
    if len(scaled) != 1:
        raise CheckError(
            f"graph {graph.model.graph.name}: expected one product of the query with the scale "
            f"{variant.scale}, found {len(scaled)}; build with attention: traced"
        )
    return scaled[0]


def _check(decode: onnx.ModelProto, cut: onnx.ModelProto, variant: AttentionVariant) -> None:
    # needed only where a graph is cut, not where engines run
    from lockstep.onnx_tools.prepare import decode_inputs
    from lockstep.onnx_tools.sessions import compute

    lengths = np.array([0, 3, _CAPACITY], np.int64)
    feeds = decode_inputs(decode, lengths, _CAPACITY)
    expected = compute(decode, feeds)
    rotated = compute(cut, feeds)
    past = feeds["value"], feeds["past_key"], feeds["past_value"]
    heads = feeds["query"].reshape(len(lengths), variant.num_heads, variant.query_dim)
    sinks = heads[:, :, variant.head_dim :].astype(np.float32)
    found = attention(rotated["query_out"], rotated["key_out"], *past, lengths, variant, sinks)
    exact = expected["attention"].astype(np.float32)
    bound = Bound(REWRITE[expected["attention"].dtype.name])
    line = wrong("output attention", measure(exact, found, bound, peak(exact)))
    if line is None and not np.array_equal(expected["key_out"], rotated["key_out"]):
        line = "output key_out: expected the same bits, found others"
    if line:
        raise CheckError(
            f"graph {decode.graph.name}: expected RoPE followed by attention: {line}; build with attention: traced"
        )


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    past_key: np.ndarray,
    past_value: np.ndarray,
    lengths: np.ndarray,
    variant: AttentionVariant,
    sinks: np.ndarray,
) -> np.ndarray:
    """Return the attention of one new token for each request, in float32.

    It is over the request's cache and the token itself. Shapes are as in the decode graph; query and key are rotated.
    sinks: [num_requests, num_heads, 1], of none [num_requests, num_heads, 0].
    """
    heads = variant.num_heads
    kv = variant.num_kv_heads
    rows = []
    for row, length in enumerate(lengths):
        first = max(0, length + 1 - variant.window) if variant.window else 0
        new = [array[row].astype(np.float32).reshape(kv, 1, -1) for array in (key, value)]
        keys, values = (
            np.concatenate([past[row, :, first:length].astype(np.float32), one], axis=1)
            for past, one in zip((past_key, past_value), new)
        )
        scores = (
            np.einsum("hd,hsd->hs", query[row].astype(np.float32), keys.repeat(heads // kv, axis=0)) * variant.scale
        )
        if variant.softcap:
            scores = variant.softcap * np.tanh(scores / variant.softcap)
        scores = np.concatenate([scores, sinks[row]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, : keys.shape[1]]
        rows.append(np.einsum("hs,hsd->hd", weights, values.repeat(heads // kv, axis=0)).reshape(-1))
    return np.stack(rows)
