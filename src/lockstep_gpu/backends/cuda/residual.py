"""The residual stream of a block in float32, where its graph has the hidden state in float32.

Kernels between products read and write it in float32. Products read and write 16 bits, so those that read or write the
stream itself, as in OLMo 2, get a copy of 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import onnx
from onnx import TensorProto, helper

from lockstep.artifacts.signature import Signature
from lockstep.onnx_tools.cut_products import CutGraph
from lockstep.onnx_tools.expert_products import SHAPING
from lockstep.onnx_tools.products import Product

HIDDEN = "hidden"
_KEEP_STREAM = ("Add", "Cast", "Gather", "Identity", *SHAPING)  # their result belongs to the stream if an input does
_COPY = "/16-bits"
_OPSET = 20


def residual_stream(model: onnx.ModelProto, signature: Signature) -> set[str]:
    """Return the names of hidden states in float32, and of their sums with other values and products with a number.

    signature: of the graph before it was widened.
    """
    ios = (*signature.inputs, *signature.outputs)
    stream = {io.name for io in ios if io.key == HIDDEN and io.dtype == "float32"}
    if not stream:
        return stream
    numbers = {tensor.name for tensor in model.graph.initializer if math.prod(tensor.dims) == 1}
    for node in model.graph.node:
        is_scaled = node.op_type == "Mul" and not numbers.isdisjoint(node.input)
        if (is_scaled or node.op_type in _KEEP_STREAM) and not stream.isdisjoint(node.input):
            stream.update(node.output)
    return stream - {io.name for io in ios if io.key != HIDDEN}  # all other inputs and outputs have 16 bits


def with_copies(cut: CutGraph, stream: Collection[str], signature: Signature) -> CutGraph:
    """Return a cut graph whose products read and write copies of the stream."""
    shapes = {io.name: io.shape for io in (*signature.inputs, *signature.outputs)} | dict(cut.inner)
    pieces = [*cut.pieces]
    inner = dict(cut.inner)
    steps = list[int | tuple[Product, ...]]()

    def narrow(name: str) -> str:
        return name + _COPY if name in stream else name

    def copy(source: str, target: str) -> None:
        """Add a piece that copies rows, and a step that runs it."""
        shape = shapes[source.removesuffix(_COPY)]
        for name in (source, target):
            if name.endswith(_COPY):
                inner[name] = shape
        steps.append(len(pieces))
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in (source, target)]
        node = helper.make_node("Identity", [source], [target])
        graph = helper.make_graph([node], target, values[:1], values[1:])
        pieces.append(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10))

    copied = set[str]()
    for step in cut.steps:
        if isinstance(step, int):
            steps.append(step)
            continue
        source = step[0].input  # of all products of a step
        if source in stream and source not in copied:
            copied.add(source)
            copy(source, source + _COPY)
        steps.append(
            tuple(replace(product, input=narrow(product.input), output=narrow(product.output)) for product in step)
        )
        for product in step:
            if product.output in stream:
                copy(product.output + _COPY, product.output)
    return CutGraph(tuple(pieces), tuple(steps), inner)
