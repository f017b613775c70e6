"""Cut RoPE out of an attention variant, for a backend with its own attention.

In: an attention variant and its decode graph. Out: the part of the graph query, key, position_ids -> query_out
[num_tokens, num_heads, head_dim], key_out [num_tokens, num_kv_heads, head_dim]. The rest must be plain attention with
the variant's numbers: the decode graph is compared with the cut graph followed by attention in NumPy. It runs on the
host in ONNX Runtime, so a bf16 graph is cut in fp32.
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
    outputs = {}
    for name, heads in (("query_out", variant.num_heads), ("key_out", variant.num_kv_heads)):
        outputs[name] = helper.make_tensor_value_info(name, element, ["num_tokens", heads, variant.head_dim])
    graph.outputs = outputs
    graph.model.graph.name = "rotary"
    cut = graph.finish()
    _check(wide, cut, dataclasses.replace(variant, scale=scale))
    return cut


def _rotated_query(graph: Rewriter, variant: AttentionVariant, eps: float | None) -> tuple[str, float]:
    """Return the name of the value that attention scales, and the scale in the graph, rounded to its type.

    The value is multiplied with the variant's scale, and the product is reshaped to groups of heads. eps: of the
    scale's type if not the graph's. Raises CheckError where there is no such product, or more than one.
    """
    groups = [-1, variant.num_kv_heads, variant.num_heads // variant.num_kv_heads, variant.head_dim]
    scaled = []
    for node in graph.nodes:
        readers = graph.consumers.get(node.output[0], [])
        if node.op_type != "Mul" or len(readers) != 1 or readers[0].op_type != "Reshape":
            continue
        scales = []
        values = []
        for name in node.input:
            array = graph.array(name)
            if array is not None and not array.shape:
                scales.append(array)
            else:
                values.append(name)
        if len(scales) != 1:
            continue
        shape = graph.array(readers[0].input[1])
        rounding = (eps or np.finfo(scales[0].dtype).eps) / 2
        is_scale = math.isclose(float(scales[0]), variant.scale, rel_tol=rounding)
        if shape is not None and shape.tolist() == groups and is_scale:
            scaled.append((values[0], float(scales[0])))
    if len(scaled) != 1:
        raise CheckError(
            f"graph {graph.model.graph.name}: expected one product of the query with the scale "
            f"{variant.scale}, found {len(scaled)}; build with attention: traced"
        )
    return scaled[0]


def _check(decode: onnx.ModelProto, cut: onnx.ModelProto, variant: AttentionVariant) -> None:
    # lazy: engines run without them
    from lockstep.onnx_tools.prepare import decode_inputs
    from lockstep.onnx_tools.sessions import compute

    lengths = np.array([0, 3, _CAPACITY], np.int64)
    feeds = decode_inputs(decode, lengths, _CAPACITY)
    expected = compute(decode, feeds)
    rotated = compute(cut, feeds)
    past = feeds["value"], feeds["past_key"], feeds["past_value"]
    heads = feeds["query"].reshape(len(lengths), variant.num_heads, variant.query_dim)
    sinks = heads[:, :, variant.head_dim :].astype(np.float32)
    result = attention(rotated["query_out"], rotated["key_out"], *past, lengths, variant, sinks)
    exact = expected["attention"].astype(np.float32)
    bound = Bound(REWRITE[expected["attention"].dtype.name])
    line = wrong("output attention", measure(exact, result, bound, peak(exact)))
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
    """Return the attention of one new token for each request over its cache and itself, in float32.

    Shapes are as in the decode graph; query and key are rotated. sinks: [num_requests, num_heads, 1], or without sinks
    [num_requests, num_heads, 0].
    """
    heads = variant.num_heads
    kv = variant.num_kv_heads
    rows = []
    for row, length in enumerate(lengths):
        first = max(0, length + 1 - variant.window) if variant.window else 0
        new_key = key[row].astype(np.float32).reshape(kv, 1, -1)
        new_value = value[row].astype(np.float32).reshape(kv, 1, -1)
        keys = np.concatenate([past_key[row, :, first:length].astype(np.float32), new_key], axis=1)
        values = np.concatenate([past_value[row, :, first:length].astype(np.float32), new_value], axis=1)
        query_row = query[row].astype(np.float32)
        scores = np.einsum("hd,hsd->hs", query_row, keys.repeat(heads // kv, axis=0)) * variant.scale
        if variant.softcap:
            scores = variant.softcap * np.tanh(scores / variant.softcap)
        scores = np.concatenate([scores, sinks[row]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, : keys.shape[1]]
        rows.append(np.einsum("hs,hsd->hd", weights, values.repeat(heads // kv, axis=0)).reshape(-1))
    return np.stack(rows)
