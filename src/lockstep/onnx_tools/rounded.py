"""Round a graph's values to bf16, to measure the noise of a precision on its actual inputs.

In: a graph. Out: the graph in float32, exact and with the results of operators on activations rounded, as an engine
rounds them; products accumulate in float32. Weights, RoPE's angles, masks and what a 16-bit graph has in float32 are
not rounded. Neither are the steps by which activations become integers or e4m3 numbers: an engine rounds its inputs,
not its steps.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, reads, typed_values
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened

UNITS = 8.0  # a rounding of bf16 in roundings of fp16
_NARROW = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
_STEP_OPERATORS = {"ReduceMax", "Max", "Mul", "Div"}  # make the step of 8-bit activations, after Abs


def exact_and_rounded(model: onnx.ModelProto, weights: Collection[str]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return the graph in float32, and with rounded values. weights: its inputs that are slots."""
    exact = widened(widened(model), TensorProto.FLOAT16)
    if exact is model:
        values = _floats(exact)
    else:
        values = {name for name, (element, _) in typed_values(model).items() if element in _NARROW}
    values -= _eight_bit_steps(exact)
    graph = Rewriter(exact)
    activations = {name for name in graph.inputs.keys() - weights if graph.element(name) == TensorProto.FLOAT}
    for node in graph.nodes:
        if activations.isdisjoint(reads(node)):
            continue
        activations.update(filter(None, node.output))
        casts = []
        for name in values.intersection(node.output):
            narrow = f"{name}/bf16"
            casts.append(helper.make_node("Cast", [f"{name}/exact"], [narrow], name=narrow, to=TensorProto.BFLOAT16))
            casts.append(helper.make_node("Cast", [narrow], [name], name=f"{name}/rounded", to=TensorProto.FLOAT))
        node.output[:] = [f"{name}/exact" if name in values else name for name in node.output]
        graph.replace(node, node, *casts)
    return exact, graph.finish(check=False)


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


def _eight_bit_steps(model: onnx.ModelProto) -> set[str]:
    """Return the values by which activations become integers or e4m3 numbers."""
    graph = Rewriter(model)
    steps: set[str] = set()
    for node in graph.nodes:
        is_e4m3 = node.op_type == "Cast" and attributes_of(node)["to"] == TensorProto.FLOAT8E4M3FN
        division = graph.producers.get(node.input[0]) if is_e4m3 or node.op_type == "Round" else None
        if division is None or division.op_type != "Div":
            continue
        steps.add(division.output[0])
        for reader in graph.consumers[node.output[0]]:
            steps.add(reader.output[0])
            for reshape in graph.consumers.get(reader.output[0], []):
                if reshape.op_type == "Reshape":
                    steps.add(reshape.output[0])
        step = graph.producers.get(division.input[1])
        while step is not None and step.op_type in _STEP_OPERATORS:
            steps.add(step.output[0])
            step = graph.producers.get(step.input[0])
    return steps
