"""Round a graph's values to bf16, to measure the noise of a precision on its actual inputs.

In: a graph. Out: the graph in float32, exact and with the results of operators on activations rounded, as an engine
rounds them; products accumulate in float32. Weights, RoPE's angles, masks and what a 16-bit graph has in float32 are
not rounded. Neither are the steps by which activations become integers or e4m3 numbers: an engine rounds its inputs,
not its steps.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir
from onnx import TensorProto

from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, replace, run_passes
from lockstep.onnx_tools.types import typed_values
from lockstep.onnx_tools.values import attribute, maker, reads
from lockstep.onnx_tools.widened import widened

UNITS = 8.0  # a rounding of bf16 in roundings of fp16
_NARROW = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
_STEP_OPERATORS = ("ReduceMax", "Max", "Mul", "Div")  # make the step of 8-bit activations, after Abs


def exact_and_rounded(model: onnx.ModelProto, weights: Collection[str]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return the graph in float32, and with rounded values. weights: its inputs that are slots."""
    exact = widened(widened(model), TensorProto.FLOAT16)
    if exact is model:  # a float32 graph: of quantised weights, whose activations engines compute in 16 bits
        values = _floats(exact)
    else:
        values = {name for name, (element, _) in typed_values(model).items() if element in _NARROW}
    return exact, run_passes(exact, RoundValues(values, weights), check=False)


def _floats(model: onnx.ModelProto) -> set[str]:
    """Return the values that are float32; ONNX's shape inference does not support ONNX Runtime's own operators."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    names: list[str] = []
    for node in model.graph.node:
        names += filter(None, node.output)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return {value.name for value in open_session(exposed.SerializeToString()).get_outputs() if "(float)" in value.type}


class RoundValues(Pass):
    """Round values that depend on activations to bf16. weights: inputs that are no activations."""

    def __init__(self, values: Collection[str], weights: Collection[str]):
        self._values = values
        self._weights = weights

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        steps = _eight_bit_steps(graph)
        activations: set[ir.Value | None] = set()
        for value in graph.inputs:
            if value.dtype == ir.DataType.FLOAT and value.name not in self._weights:
                activations.add(value)
        is_rounded = False
        for node in list(graph):  # the casts that are added take their values' names
            if activations.isdisjoint(reads(node)):
                continue
            activations.update(node.outputs)
            for value in node.outputs:
                if value.name in self._values and value not in steps:
                    writer = GraphWriter(graph, f"{value.name}/rounded", after=node)
                    narrow = writer.op("Cast", value, to=ir.DataType.BFLOAT16)
                    rounded = writer.op("Cast", narrow, to=ir.DataType.FLOAT)
                    replace(value, rounded, keep=narrow.producer())
                    activations.add(rounded)
                    is_rounded = True
        return PassResult(model, is_rounded)


def _eight_bit_steps(graph: ir.Graph) -> set[ir.Value]:
    """Return the values by which activations become integers or e4m3 numbers."""
    steps: set[ir.Value] = set()
    for node in graph:
        is_e4m3 = node.op_type == "Cast" and attribute(node, "to") == ir.DataType.FLOAT8E4M3FN
        if node.op_type != "Round" and not is_e4m3:
            continue
        # Round(x / step) * step, and the operators that compute the step from x.
        division = maker(node.inputs[0], "Div")
        if division is None:
            continue
        steps.add(division.outputs[0])
        for reader in node.outputs[0].consumers():
            steps.add(reader.outputs[0])
            for reshape in reader.outputs[0].consumers():
                if reshape.op_type == "Reshape":
                    steps.add(reshape.outputs[0])
        step = maker(division.inputs[1], *_STEP_OPERATORS)
        while step is not None:
            steps.add(step.outputs[0])
            step = maker(step.inputs[0], *_STEP_OPERATORS)
    return steps
