"""The batchless graphs of token mixers with a state.

In: a StateGraph (cut.py). Out: canonical prefill and decode graphs, and the form without a state that the uncut
`batchful.onnx` calls. The state is float32, and of zeros before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.export.canonical import Graph, canonical
from lockstep.export.graph_writer import GraphWriter

_END = 2**31 - 1


@dataclass(frozen=True)
class TokenWindow:
    """Each token beside the `width` - 1 before it, oldest first. size: numbers of a token; dtype: theirs.

    state: the last width - 1 tokens, [width - 1, size].
    """

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
        past = build.op("Squeeze", build.state, build.ints(0))
        rows = build.op("Concat", build.cast(past, self.dtype), build.inputs["value"], axis=0)
        ends = [back or _END for back in range(1 - self.width, 1)]
        parts = [
            build.op("Slice", rows, build.ints(start), build.ints(end), build.ints(0)) for start, end in enumerate(ends)
        ]
        last = build.op("Slice", rows, build.ints(1 - self.width), build.ints(_END), build.ints(0))
        return build.op("Concat", *parts, axis=1), build.op("Unsqueeze", last, build.ints(0))

    def decode(self, build: Builder) -> tuple[ir.Value, ir.Value]:
        new = build.op("Unsqueeze", build.inputs["value"], build.ints(1))
        rows = build.op("Concat", build.cast(build.state, self.dtype), new, axis=1)
        last = build.op("Slice", rows, build.ints(1), build.ints(_END), build.ints(1))
        return build.op("Reshape", rows, build.ints(-1, self.width * self.size)), last


StateGraph = TokenWindow


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
    """Build the mixer of one whole sequence. As `prefill` behind nothing; gives `attention` alone."""
    build = Builder(mixer, "num_tokens", None)
    return build.finish("attention", mixer.prefill(build)[0], None)


class Builder(GraphWriter):
    """A graph that takes a mixer's inputs and its past state. requests: None for a constant state of zeros."""

    def __init__(self, mixer: StateGraph, tokens: str, requests: str | int | None):
        self.mixer, self.tokens, self.requests = mixer, tokens, requests
        self.inputs = {name: _value(name, [tokens, size], dtype) for name, (size, dtype) in mixer.sizes.items()}
        graph = ir.Graph(list(self.inputs.values()), [], nodes=[], opset_imports={"": 20}, name="mixer")
        super().__init__(graph, "mixer")
        if requests is None:
            self.state = self.op("Expand", self.const(np.float32(0)), self.ints(1, *mixer.state))
        else:
            self.state = _value("past_state", [requests, *mixer.state], ir.DataType.FLOAT)
            self.graph.inputs.append(self.state)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return a value in `dtype`. value: float32 (the state)."""
        return value if dtype == ir.DataType.FLOAT else self.op("Cast", value, to=dtype)

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


def _value(name: str, shape: list[Any], dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _name(value: ir.Value, name: str, shape: list[Any], dtype: ir.DataType) -> None:
    value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(dtype)
