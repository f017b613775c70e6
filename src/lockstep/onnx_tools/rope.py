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
import onnx_ir as ir

from lockstep.artifacts.assembly import AttentionVariant
from lockstep.errors import CheckError
from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, run_passes
from lockstep.onnx_tools.values import array_of, required, shape_of
from lockstep.onnx_tools.widened import widened
from lockstep.tolerances import REWRITE

_CAPACITY = 7
_BF16 = 2**-7  # its eps


def rotary(decode: onnx.ModelProto, variant: AttentionVariant) -> onnx.ModelProto:
    """Cut RoPE out of a decode graph. Raises CheckError where the graph is not RoPE and then attention."""
    wide = widened(decode)
    eps = None if wide is decode else _BF16  # the scale was rounded to bf16 before the graph was widened
    cut_rope = CutRope(variant, eps)
    cut = run_passes(wide, cut_rope)
    _check(wide, cut, dataclasses.replace(variant, scale=cut_rope.scale))
    return cut


class CutRope(Pass):
    """Cut RoPE out of a decode graph: rotated queries and keys become its outputs.

    eps: of the scale's type if not the graph's. scale: in the graph, rounded to its type. Raises CheckError where the
    graph is not RoPE and then attention.
    """

    def __init__(self, variant: AttentionVariant, eps: float | None):
        self._variant = variant
        self._eps = eps
        self.scale = variant.scale

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        variant = self._variant
        query, self.scale = rotated_query(graph, variant, self._eps)
        for value in graph.inputs:
            value.shape = ir.Shape(["num_tokens", *shape_of(value)[1:]])
        query = GraphWriter(graph).op("Identity", query, result="query_out", name="query_out")
        key = next(value for value in graph.outputs if value.name == "key_out")
        graph.outputs.clear()
        for value, heads in ((query, variant.num_heads), (key, variant.num_kv_heads)):
            value.type = key.type  # queries and keys may come in float32
            value.shape = ir.Shape(["num_tokens", heads, variant.head_dim])
            graph.outputs.append(value)
        graph.name = "rotary"
        return PassResult(model, True)


def rotated_query(graph: ir.Graph, variant: AttentionVariant, eps: float | None) -> tuple[ir.Value, float]:
    """Return the value that attention scales, and the scale in the graph. eps: of the scale's type if not the graph's.

    The value is multiplied with the variant's scale, and the product is reshaped to groups of heads. Raises
    CheckError where there is no such product, or more than one.
    """
    groups = [-1, variant.num_kv_heads, variant.num_heads // variant.num_kv_heads, variant.head_dim]
    scaled = []
    for node in graph:
        readers = node.outputs[0].consumers()
        if node.op_type != "Mul" or len(readers) != 1 or readers[0].op_type != "Reshape":
            continue
        arrays = [array_of(value) for value in node.inputs]
        scales = [array for array in arrays if array is not None and not array.shape]
        values = [value for value, array in zip(node.inputs, arrays) if array is None or array.shape]
        if len(scales) != 1:
            continue
        shape = array_of(readers[0].inputs[1])
        # The graph's scale was rounded to its type, the variant's was not.
        rounding = (eps or np.finfo(scales[0].dtype).eps) / 2
        is_scale = math.isclose(float(scales[0]), variant.scale, rel_tol=rounding)
        if shape is not None and shape.tolist() == groups and is_scale:
            scaled.append((required(values[0]), float(scales[0])))
    if len(scaled) != 1:
        raise CheckError(
            f"graph {graph.name}: expected one product of the query with the scale {variant.scale}, found "
            f"{len(scaled)}; build with attention: traced"
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
        first = 0
        if variant.window:
            first = max(0, length + 1 - variant.window)
        new_key = key[row].astype(np.float32).reshape(kv, 1, -1)
        new_value = value[row].astype(np.float32).reshape(kv, 1, -1)
        keys = np.concatenate([past_key[row, :, first:length].astype(np.float32), new_key], axis=1)
        values = np.concatenate([past_value[row, :, first:length].astype(np.float32), new_value], axis=1)
        query_row = query[row].astype(np.float32)
        scores = np.einsum("hd,hsd->hs", query_row, keys.repeat(heads // kv, axis=0)) * variant.scale
        if variant.softcap:
            scores = variant.softcap * np.tanh(scores / variant.softcap)
        # A sink takes a share of the weights and has no value.
        scores = np.concatenate([scores, sinks[row]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, : keys.shape[1]]
        rows.append(np.einsum("hs,hsd->hd", weights, values.repeat(heads // kv, axis=0)).reshape(-1))
    return np.stack(rows)
