"""The batchless graphs of token mixers with a state.

In: a StateGraph (cut.py). Out: canonical prefill and decode graphs, and the form without a state that the uncut
`batchful.onnx` calls. The state is float32, and of zeros before the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.export.canonical import OPSET, Graph, canonical
from lockstep.onnx_tools.toolkit import GraphWriter, Operand, add_input

_END = 2**31 - 1
_SPAN = 64  # tokens of a prompt that a recurrence computes by products: as many as transformers does


@dataclass(frozen=True)
class TokenWindow:
    """Each token after the `width` - 1 before it, oldest first, which are the state."""

    size: int
    width: int
    dtype: ir.DataType

    name = "window"
    inputs = ("value",)

    @property
    def state(self) -> tuple[int, ...]:
        return self.width - 1, self.size

    @property
    def sizes(self) -> dict[str, tuple[int, ir.DataType]]:
        return {"value": (self.size, self.dtype)}

    @property
    def output(self) -> tuple[int, ir.DataType]:
        return self.width * self.size, self.dtype

    def prefill(self, build: Builder) -> tuple[ir.Value, ir.Value]:
        past = build.op("Squeeze", build.state, [0])
        rows = build.op("Concat", build.cast(past, self.dtype), build.inputs["value"], axis=0)
        windows = []
        for start in range(self.width):
            end = start + 1 - self.width or _END  # a negative end counts from the last token
            windows.append(build.op("Slice", rows, [start], [end], [0]))
        last = build.op("Slice", rows, [1 - self.width], [_END], [0])
        return build.op("Concat", *windows, axis=1), build.op("Unsqueeze", last, [0])

    def decode(self, build: Builder) -> tuple[ir.Value, ir.Value]:
        new = build.op("Unsqueeze", build.inputs["value"], [1])
        rows = build.op("Concat", build.cast(build.state, self.dtype), new, axis=1)
        last = build.op("Slice", rows, [1], [_END], [1])
        return build.op("Reshape", rows, [-1, self.width * self.size]), last


@dataclass(frozen=True)
class Recurrence:
    """The gated delta rule (Yang et al. 2024), or without beta linear attention with decay (Mamba-2, Dao and Gu 2024).

    A token's state is S = exp(decay) S + key (beta (value - key exp(decay) S)), without beta exp(decay) S + key value;
    its output is query S. sizes_by_name: of a token's inputs. state: [value_heads, key_dim, value_dim]; consecutive
    value heads share a key head.
    """

    sizes_by_name: Mapping[str, int]
    key_heads: int
    value_heads: int

    dtype = ir.DataType.FLOAT

    @property
    def name(self) -> str:
        return "delta_rule" if "beta" in self.sizes_by_name else "linear_attention"

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.sizes_by_name)

    @property
    def key_dim(self) -> int:
        return self.sizes_by_name["key"] // self.key_heads

    @property
    def value_dim(self) -> int:
        return self.sizes_by_name["value"] // self.value_heads

    @property
    def state(self) -> tuple[int, ...]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def sizes(self) -> dict[str, tuple[int, ir.DataType]]:
        return {name: (size, self.dtype) for name, size in self.sizes_by_name.items()}

    @property
    def output(self) -> tuple[int, ir.DataType]:
        return self.sizes_by_name["value"], self.dtype

    def prefill(self, build: Builder) -> tuple[ir.Value, ir.Value]:
        """Compute `_SPAN` tokens at a time: by products within a span, whose state goes to the next span.

        Method: the UT transform of Yang et al. 2024, section 3. What a token subtracts for the values before it is a
        unit lower triangular system; its inverse is composed of those of its halves.
        """
        group = self.value_heads // self.key_heads
        op = build.op
        span = _SPAN
        count = op("Shape", build.inputs["value"], start=0, end=1)
        missing = op("Mod", op("Neg", count), [span])
        pads = op("Concat", [0, 0], missing, [0], axis=0)

        def spans(name: str, heads: int, size: int) -> ir.Value:
            """Return an input as [spans, key_heads, heads, _SPAN, size], padded with zeros."""
            rows = op("Pad", build.inputs[name], pads)
            rows = op("Reshape", rows, [-1, span, self.key_heads, heads, size])
            return op("Transpose", rows, perm=[0, 2, 3, 1, 4])

        def transposed(value: ir.Value) -> ir.Value:
            return op("Transpose", value, perm=[0, 1, 2, 4, 3])

        query = spans("query", 1, self.key_dim)
        key = spans("key", 1, self.key_dim)
        value = spans("value", group, self.value_dim)
        total_decay = op("CumSum", spans("decay", group, 1), np.int64(3))  # [..., span, 1]
        decay_from_start = op("Exp", total_decay)
        row = np.arange(span)[:, None]
        column = np.arange(span)
        difference = op("Sub", total_decay, transposed(total_decay))
        # The decay from one token of a span to a later one; 0 to earlier ones.
        decay_between = op("Exp", op("Where", row >= column, difference, np.float32(-1e30)))
        delta_key = []
        if "beta" in self.sizes_by_name:
            beta = spans("beta", group, 1)
            system = op("Mul", op("Mul", op("MatMul", key, transposed(key)), decay_between), beta)
            inverse: Operand = np.eye(span, dtype=np.float32)
            half = 1
            while half < span:
                is_corner = (row // half % 2 == 1) & (column // half == row // half - 1)
                corner = op("Mul", system, is_corner.astype(np.float32))
                inverse = op("Sub", inverse, op("MatMul", op("MatMul", inverse, corner), inverse))
                half *= 2
            value = op("MatMul", inverse, op("Mul", value, beta))
            delta_key = [op("MatMul", inverse, op("Mul", op("Mul", key, beta), decay_from_start))]
        span_decay = op("Slice", total_decay, [-1], [_END], [3])
        key_to_end = op("Mul", key, op("Exp", op("Sub", span_decay, total_decay)))
        attention = op("Mul", op("MatMul", query, transposed(key)), decay_between)
        scan_query = op("Mul", query, decay_from_start)
        inputs = [value, scan_query, attention, transposed(key_to_end), op("Exp", span_decay), *delta_key]
        rows, state = self._scan(build, inputs)
        rows = op("Reshape", op("Transpose", rows, perm=[0, 3, 1, 2, 4]), [-1, self.output[0]])
        return op("Slice", rows, [0], count, [0]), state

    def _scan(self, build: Builder, inputs: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Return the spans' outputs, [spans, key_heads, group, _SPAN, value_dim], and the state after the last.

        inputs: by span the values, the queries, their weights on the span's own values, the keys, the decay over the
        whole span, and for the delta rule the keys that read what the values subtract from the state before.
        """
        heads = (self.key_heads, self.value_heads // self.key_heads)
        keys = self.key_dim
        values = self.value_dim
        shapes = [(_SPAN, values), (_SPAN, keys), (_SPAN, _SPAN), (keys, _SPAN), (1, 1), (_SPAN, keys)]
        body = _SpanWriter()
        past = add_input(body.graph, "span_state", self.dtype, [*heads, keys, values])
        taken = []
        for number, shape in enumerate(shapes[: len(inputs)], 1):
            taken.append(add_input(body.graph, f"taken_{number}", self.dtype, [*heads, *shape]))
        # A span's output is what its queries read of the state before it, and of the values of the span up to them.
        new, query, attention, key, decay, *delta_key = taken
        if delta_key:
            new = body.op("Sub", new, body.op("MatMul", delta_key[0], past))
        rows = body.op("Add", body.op("MatMul", query, past), body.op("MatMul", attention, new))
        next_state = body.op("Add", body.op("Mul", past, decay), body.op("MatMul", key, new))
        _name(next_state, "span_state_out", [*heads, keys, values], self.dtype)
        _name(rows, "span_attention", [*heads, _SPAN, values], self.dtype)
        body.graph.outputs.extend([next_state, rows])
        state = build.op("Reshape", build.state, [*heads, keys, values])
        attributes = [ir.AttrGraph("body", body.graph), ir.AttrInt64("num_scan_inputs", len(inputs))]
        node = ir.Node("", "Scan", [state, *inputs], attributes, num_outputs=2)
        build.graph.append(node)
        return node.outputs[1], build.op("Reshape", node.outputs[0], [1, *self.state])

    def decode(self, build: Builder) -> tuple[ir.Value, ir.Value]:
        # The formula of the class for one token of all heads. A key head serves `group` value heads: the size 1 of
        # keys and queries in that dimension broadcasts.
        group = self.value_heads // self.key_heads

        def heads(name: str, *dims: int) -> ir.Value:
            return build.op("Reshape", build.inputs[name], [-1, self.key_heads, *dims])

        query = heads("query", 1, 1, self.key_dim)
        key = heads("key", 1, 1, self.key_dim)
        column = heads("key", 1, self.key_dim, 1)
        value = heads("value", group, 1, self.value_dim)
        state = build.op("Reshape", build.state, [-1, self.key_heads, group, self.key_dim, self.value_dim])
        state = build.op("Mul", state, build.op("Exp", heads("decay", group, 1, 1)))
        if "beta" in self.sizes_by_name:
            value = build.op("Sub", value, build.op("MatMul", key, state))
            value = build.op("Mul", value, heads("beta", group, 1, 1))
        state = build.op("Add", state, build.op("Mul", column, value))
        output = build.op("Reshape", build.op("MatMul", query, state), [-1, self.output[0]])
        return output, build.op("Reshape", state, [-1, *self.state])


StateGraph = TokenWindow | Recurrence


def prefill(mixer: StateGraph) -> Graph:
    """Build the mixer of one request's new tokens.

    Its inputs [num_tokens, size], past_state [1, *state] float32 -> attention [num_tokens, size], state_out
    [1, *state].
    """
    build = Builder(mixer, "num_tokens", 1)
    return build.finish("prefill", *mixer.prefill(build))


def decode(mixer: StateGraph) -> Graph:
    """Build the mixer of one new token for each of several requests: as `prefill`, with num_requests for both."""
    build = Builder(mixer, "num_requests", "num_requests")
    return build.finish("decode", *mixer.decode(build))


def without_state(mixer: StateGraph) -> Graph:
    """Build the mixer of one whole sequence, without past and state_out. As `prefill`; returns `attention` alone."""
    build = Builder(mixer, "num_tokens", None)
    return build.finish("attention", mixer.prefill(build)[0], None)


class _SpanWriter(GraphWriter):
    """The body of a scan over spans. No canonical form renames it: its order and names are part of a graph's digest."""

    def __init__(self) -> None:
        super().__init__(ir.Graph([], [], nodes=[], name="span"))

    def op(self, op_type: str, *inputs: Operand | None, **attributes: Any) -> ir.Value:
        value = super().op(op_type, *inputs, **attributes)
        value.name = f"span_{len(self.graph)}"
        return value


class Builder(GraphWriter):
    """A graph that has a mixer's inputs and its past state. requests: None for a constant state of zeros."""

    def __init__(self, mixer: StateGraph, tokens: str, requests: str | int | None):
        self.mixer = mixer
        self.tokens = tokens
        self.requests = requests
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="mixer")
        super().__init__(graph)
        self.inputs = {}
        for name, (size, dtype) in mixer.sizes.items():
            self.inputs[name] = add_input(graph, name, dtype, [tokens, size])
        if requests is None:
            self.state = self.op("Expand", np.float32(0), [1, *mixer.state])
        else:
            self.state = add_input(graph, "past_state", ir.DataType.FLOAT, [requests, *mixer.state])

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if dtype == ir.DataType.FLOAT:  # as the state is
            return value
        return self.op("Cast", value, to=dtype)

    def finish(self, name: str, output: ir.Value, state: ir.Value | None) -> Graph:
        size, dtype = self.mixer.output
        _name(output, "attention", [self.tokens, size], dtype)
        self.graph.outputs.append(output)
        if state is not None:
            if self.mixer.dtype != ir.DataType.FLOAT:
                state = self.op("Cast", state, to=ir.DataType.FLOAT)
            _name(state, "state_out", [self.requests, *self.mixer.state], ir.DataType.FLOAT)
            self.graph.outputs.append(state)
        return canonical(self.graph, name, (*self.mixer.inputs, "past_state"), {})


def _name(value: ir.Value, name: str, shape: list[Any], dtype: ir.DataType) -> None:
    value.name = name
    value.shape = ir.Shape(shape)
    value.type = ir.TensorType(dtype)
