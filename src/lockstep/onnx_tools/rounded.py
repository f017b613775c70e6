"""A graph whose values are rounded to bf16, and so the noise of a precision on the inputs that it is run on.

In: a graph. Out: the graph in float32, exact and with what each operator gives of its activations rounded, as an engine
rounds it; products accumulate in float32. Weights stay as they are, and so do RoPE's angles, masks, and what a graph of
16 bits has in float32. Where activations become integers or e4m3 numbers this is done as before: an engine rounds what
goes into it, not its steps.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, reads, typed_values
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened

UNITS = 8.0  # of fp16's roundings in one of bf16's
_NARROW = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
_STEP = {"ReduceMax", "Max", "Mul", "Div"}  # what makes the step of 8-bit activations, behind Abs


def exact_and_rounded(model: onnx.ModelProto, weights: Collection[str]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return the graph in float32, and with rounded values. weights: its inputs that are slots."""
    exact = widened(widened(model), TensorProto.FLOAT16)
    values = (
        _floats(exact) if exact is model else {name for name, kind in typed_values(model).items() if kind[0] in _NARROW}
    )
    values -= _eight_bit_steps(exact)
    graph = Rewriter(exact)
    moving = {name for name in graph.inputs.keys() - weights if graph.element(name) == TensorProto.FLOAT}
    for node in graph.nodes:
        if not any(name in moving for name in reads(node)):
            continue
        moving.update(filter(None, node.output))
        casts = []
        for name in values.intersection(node.output):
            narrow = f"{name}/bf16"
            casts.append(helper.make_node("Cast", [f"{name}/exact"], [narrow], name=narrow, to=TensorProto.BFLOAT16))
            casts.append(helper.make_node("Cast", [narrow], [name], name=f"{name}/rounded", to=TensorProto.FLOAT))
        node.output[:] = [f"{name}/exact" if name in values else name for name in node.output]
        graph.replace(node, node, *casts)
    return exact, graph.finish(check=False)


def _floats(model: onnx.ModelProto) -> set[str]:
    """Return the values that are float32; ONNX's shape inference does not know ONNX Runtime's own operators."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    names = [name for node in model.graph.node for name in node.output if name]
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return {value.name for value in open_session(exposed.SerializeToString()).get_outputs() if "(float)" in value.type}


def _eight_bit_steps(model: onnx.ModelProto) -> set[str]:
    """Return the values by which activations become integers or e4m3 numbers."""
    graph = Rewriter(model)
    steps = set[str]()
    for node in graph.nodes:
        is_e4m3 = node.op_type == "Cast" and attributes_of(node)["to"] == TensorProto.FLOAT8E4M3FN
        divided = graph.producers.get(node.input[0]) if is_e4m3 or node.op_type == "Round" else None
        if divided is None or divided.op_type != "Div":
            continue
        readers = graph.consumers[node.output[0]]
        shaped = [other for reader in readers for other in graph.consumers.get(reader.output[0], [])]
        steps |= {divided.output[0], *(reader.output[0] for reader in readers)}
        steps |= {reader.output[0] for reader in shaped if reader.op_type == "Reshape"}
        step = graph.producers.get(divided.input[1])
        while step is not None and step.op_type in _STEP:
            steps.add(step.output[0])
            step = graph.producers.get(step.input[0])
    return steps
