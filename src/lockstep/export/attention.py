"""The batchless graphs: RoPE, then causal attention over a KV cache.

The attention has no parameters. Where heads have sinks (a logit next to the scores), the query carries them after the
numbers of each head, [num_tokens, num_heads * (head_dim + 1)].

In: a BatchlessGraph (cut.py). Out: canonical prefill and decode graphs, and the cache-free form that the uncut
`batchful.onnx` calls. Shapes: see `prefill` and `decode`. Products run in the graph's dtype, softmax in float32.
Queries are scaled before the product, which keeps float16 scores in range. Reference: scaled dot-product attention,
Vaswani et al. 2017; grouped heads, Ainslie et al. 2023.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lockstep.export.canonical import Graph, canonical
from lockstep.export.cut import BatchlessGraph
from lockstep.onnx_tools.toolkit import GraphWriter, add_input
from lockstep.onnx_tools.values import dtype_of, shape_of

_LOWEST = np.float32(-3.0e38)  # finite, so that a row without any allowed key gives no NaN
# The position of an unused cache row, later than all queries; fits int32 too, which some backends use.
_NEVER = np.int64(2**31 - 1)
_ORDER = ("query", "key", "value", "position_ids", "past_key", "past_value", "past_lengths")


def prefill(batchless: BatchlessGraph) -> Graph:
    """Build the attention of one request's new tokens over its cache and themselves.

    query [num_tokens, num_heads*head_dim], key, value [num_tokens, num_kv_heads*head_dim], position_ids [num_tokens]
    int64, past_key, past_value [1, num_kv_heads, past_capacity, head_dim] of which past_lengths [1] int64 rows are
    filled -> attention [num_tokens, num_heads*head_dim], key_out (rotated), value_out [num_tokens, num_kv_heads,
    head_dim].
    """
    build = AttentionBuilder(batchless)
    past_key, past_value, lengths = build.past(1)
    # Cache row i holds position i, if it is filled; the causal mask hides the others, as all queries precede them.
    rows = build.op("Range", np.int64(0), build.capacity(past_key), np.int64(1))
    filled = build.op("Less", rows, lengths)
    past_positions = build.op("Where", filled, rows, _NEVER)
    positions = build.op("Concat", past_positions, build.position_ids, axis=0)
    keys = build.op("Concat", past_key, build.to_cache(build.key), axis=2)
    values = build.op("Concat", past_value, build.to_cache(build.value), axis=2)
    return build.finish("prefill", build.attend(keys, values, positions))


def without_cache(batchless: BatchlessGraph) -> Graph:
    """Build the attention of one whole sequence. As `prefill` with nothing in the cache; returns `attention` alone."""
    build = AttentionBuilder(batchless)
    attention = build.attend(build.to_cache(build.key), build.to_cache(build.value), build.position_ids)
    return build.finish("attention", attention, cache_rows=False)


def decode(batchless: BatchlessGraph) -> Graph:
    """Build the attention of one new token for each of several requests, over caches in their memory layout.

    As `prefill`, with num_requests for num_tokens and past_key, past_value [num_requests, num_kv_heads, past_capacity,
    head_dim], past_lengths [num_requests]. A new token's position is its request's past length.
    """
    build = AttentionBuilder(batchless, tokens="num_requests")
    group = build.group
    kv = batchless.num_kv_heads
    dim = batchless.head_dim
    vdim = batchless.value_head_dim
    past_key, past_value, lengths = build.past("num_requests")
    query = build.op("Reshape", build.scaled_query(), [-1, kv, group, dim])
    # The new key is not joined to the cache, which would copy it: its scores are computed apart and joined instead.
    # [R, kv, S, dim] x [R, kv, dim, group]: as the left operand the cache needs no transpose.
    past_scores = build.op("MatMul", past_key, build.op("Transpose", query, perm=[0, 1, 3, 2]))
    past_scores = build.softcap(build.to_float(build.op("Transpose", past_scores, perm=[0, 1, 3, 2])))
    new_scores = build.softcap(build.to_float(build.op("MatMul", query, build.op("Unsqueeze", build.key, [3]))))
    rows = build.op("Range", np.int64(0), build.capacity(past_key), np.int64(1))
    lengths = build.op("Unsqueeze", lengths, [1])
    allowed = build.op("Less", rows, lengths)
    if batchless.window:
        near = build.op("Less", build.op("Sub", lengths, rows), np.int64(batchless.window))
        allowed = build.op("And", allowed, near)
    allowed = build.op("Unsqueeze", allowed, [1, 2])
    past_scores = build.op("Where", allowed, past_scores, _LOWEST)
    weights = build.weights(past_scores, new_scores)
    past_weights = build.op("Slice", weights, [0], [-1], [3])
    new_weights = build.op("Slice", weights, [-1], [2**31 - 1], [3])
    new_value = build.op("Mul", new_weights, build.op("Unsqueeze", build.value, [2]))
    attention = build.op("Add", build.op("MatMul", past_weights, past_value), new_value)
    return build.finish("decode", build.op("Reshape", attention, [-1, batchless.num_heads * vdim]))


class AttentionBuilder(GraphWriter):
    """A copy of a batchless graph to which attention is appended, operator by operator."""

    def __init__(self, batchless: BatchlessGraph, tokens: str = "num_tokens"):
        super().__init__(batchless.graph.clone())
        self.batchless = batchless
        self.tokens = tokens
        self.group = batchless.num_heads // batchless.num_kv_heads
        for value in self.graph.inputs:
            value.shape = ir.Shape([tokens, *shape_of(value)[1:]])
        self.position_ids = next(value for value in self.graph.inputs if value.name == "position_ids")
        self.query, self.key, self.value = self.graph.outputs[:3]
        self.sinks = next(iter(self.graph.outputs[3:]), None)  # [num_tokens, num_heads]
        self.dtype = dtype_of(self.key)

    def past(self, requests: int | str) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Add the cache inputs past_key, past_value and past_lengths, and return them; requests: a number or a name."""
        rows = [requests, self.batchless.num_kv_heads, "past_capacity"]
        past_key = add_input(self.graph, "past_key", self.dtype, [*rows, self.batchless.head_dim])
        past_value = add_input(self.graph, "past_value", self.dtype, [*rows, self.batchless.value_head_dim])
        return past_key, past_value, add_input(self.graph, "past_lengths", ir.DataType.INT64, [requests])

    def capacity(self, past_key: ir.Value) -> ir.Value:
        return self.op("Gather", self.op("Shape", past_key), np.int64(2), axis=0)

    def to_float(self, value: ir.Value) -> ir.Value:
        return self.cast(value, ir.DataType.FLOAT)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if self.dtype == ir.DataType.FLOAT:  # computes in float32 throughout
            return value
        return self.op("Cast", value, to=dtype)

    def scaled_query(self) -> ir.Value:
        return self.op("Mul", self.query, np.asarray(self.batchless.scale).astype(self.dtype.numpy()))

    def softcap(self, scores: ir.Value) -> ir.Value:
        """Return cap * tanh(scores / cap) where the model caps its scores, else `scores`."""
        if not self.batchless.softcap:
            return scores
        cap = np.float32(self.batchless.softcap)
        return self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)

    def weights(self, *scores: ir.Value) -> ir.Value:
        """Return the softmax of scores, concatenated along their last axis, without the sinks that take part in it.

        [kv, group, num_tokens, num_keys], for decode [num_requests, kv, group, num_keys].
        """
        columns = list(scores)
        if self.sinks is not None:
            sinks = self.to_float(self.op("Reshape", self.sinks, [-1, self.batchless.num_kv_heads, self.group, 1]))
            if self.tokens != "num_requests":
                sinks = self.op("Transpose", sinks, perm=[1, 2, 0, 3])
            columns.append(sinks)
        joined = columns[0]
        if len(columns) > 1:
            joined = self.op("Concat", *columns, axis=-1)
        weights = self.cast(self.op("Softmax", joined, axis=-1), self.dtype)
        if self.sinks is None:
            return weights
        return self.op("Slice", weights, [0], [-1], [3])  # a sink has a weight and no value

    def to_cache(self, value: ir.Value) -> ir.Value:
        """Return [num_tokens, num_kv_heads, dim] in the cache's layout, [1, num_kv_heads, num_tokens, dim]."""
        return self.op("Unsqueeze", self.op("Transpose", value, perm=[1, 0, 2]), [0])

    def attend(self, keys: ir.Value, values: ir.Value, positions: ir.Value) -> ir.Value:
        """Return [num_tokens, num_heads * head_dim] over keys, values [1, num_kv_heads, num_keys, head_dim]."""
        batchless = self.batchless
        group = self.group
        query = self.op("Reshape", self.scaled_query(), [-1, batchless.num_kv_heads, group, batchless.head_dim])
        query = self.op("Transpose", query, perm=[1, 2, 0, 3])  # [kv, group, N, dim]
        scores = self.op("MatMul", query, self.op("Transpose", keys, perm=[1, 0, 3, 2]))  # [kv, group, N, num_keys]
        scores = self.softcap(self.to_float(scores))
        distance = self.op("Sub", self.op("Unsqueeze", self.position_ids, [1]), self.op("Unsqueeze", positions, [0]))
        allowed = self.op("GreaterOrEqual", distance, np.int64(0))
        if batchless.window:
            allowed = self.op("And", allowed, self.op("Less", distance, np.int64(batchless.window)))
        scores = self.op("Where", allowed, scores, _LOWEST)
        weights = self.weights(scores)
        attention = self.op("MatMul", weights, self.op("Transpose", values, perm=[1, 0, 2, 3]))
        attention = self.op("Transpose", attention, perm=[2, 0, 1, 3])
        return self.op("Reshape", attention, [-1, batchless.num_heads * batchless.value_head_dim])

    def finish(self, name: str, attention: ir.Value, cache_rows: bool = True) -> Graph:
        batchless = self.batchless
        results = [(attention, "attention", [batchless.num_heads * batchless.value_head_dim])]
        if cache_rows:
            results.append((self.key, "key_out", [batchless.num_kv_heads, batchless.head_dim]))
            results.append((self.value, "value_out", [batchless.num_kv_heads, batchless.value_head_dim]))
        for value, label, shape in results:
            value.name = label
            value.shape = ir.Shape([self.tokens, *shape])
            value.type = ir.TensorType(self.dtype)
        self.graph.outputs[:] = [value for value, _, _ in results]
        return canonical(self.graph, name, _ORDER, {})
