"""Have TensorRT 8.6 take a whole fp16 graph as one fused region at a low optimization level, by nodes that change nothing.

8.6 gives its compiler of fused regions only those parts of a graph that it expects to gain from; where a Gather of fp16 numbers makes the result, it gives it
all. Levels 4 and 5 come to that too, by trying many ways to divide the graph and building each. (Seen, not documented.) The Gather stands at an output, where
the last kernel writes through the index. On the vector of a norm's weights, which kernels of one row read in their innermost loop, it made those slower.

A region has one floating type for all its inputs and outputs, so a graph with fp16 and fp32 ones is refused. So is one in which the parser must bring an fp32
operand to the rank of the other: the layer that it puts there gives fp16 in a region. Weights that are normed in fp32 therefore come with their leading ones.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LEVEL = 3  # at most: higher ones only search for what this gives at once
_BROADCASTS = ("Add", "Sub", "Mul", "Div")


def as_one_region(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy whose last fp16 output [N, W] is element 0 of itself as [1, N, W]: the same bits. None where there is no such output, or a Gather makes it.
    Weights that are broadcast in fp32 have the rank of the other operand from the start.

    The last and not the first, which a block has in its midst: what follows it would be slower.
    """
    outputs = [value for value in model.graph.output if value.type.tensor_type.elem_type == TensorProto.FLOAT16 and len(value.type.tensor_type.shape.dim) == 2]
    if not outputs:
        return None
    name, width = outputs[-1].name, outputs[-1].type.tensor_type.shape.dim[1].dim_value
    if not width or any(node.op_type == "Gather" and name in node.output for node in model.graph.node):
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _bring_to_rank(copy)
    for node in copy.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}/all" if each == name else each for each in names]
    copy.graph.initializer.append(numpy_helper.from_array(np.array([1, -1, width], np.int64), f"{name}/shape"))
    copy.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), f"{name}/first"))
    copy.graph.node.append(helper.make_node("Reshape", [f"{name}/all", f"{name}/shape"], [f"{name}/cube"], name=f"{name}/reshape"))
    copy.graph.node.append(helper.make_node("Gather", [f"{name}/cube", f"{name}/first"], [name], name=f"{name}/gather", axis=0))
    onnx.checker.check_model(copy, full_check=True)
    return copy


def _bring_to_rank(model: onnx.ModelProto) -> None:
    """Where a weight, made fp32 and perhaps shifted or scaled, is broadcast to a higher rank, compute that operand from the weight with leading ones."""
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {value.name: value.type.tensor_type for value in (*inferred.input, *inferred.value_info, *inferred.output)}
    shapes = {name: [dim.dim_value for dim in known.shape.dim] for name, known in types.items()}
    weights = {value.name for value in graph.input if shapes[value.name] and all(shapes[value.name])}
    scalars = {tensor.name for tensor in graph.initializer if not tensor.dims}
    made = {output: node for node in graph.node for output in node.output}
    nodes: dict[str, onnx.NodeProto] = {}  # by what they make

    def at_rank(name: str, rank: int) -> str | None:
        """What `name` is called with leading ones; None where it is not made of weights and scalars, element by element."""
        if name in scalars:
            return name
        new, node = f"{name}/rank {rank}", made.get(name)
        if new in nodes:
            return new
        if name in weights:
            dims = np.array([1] * (rank - len(shapes[name])) + shapes[name], np.int64)
            graph.initializer.append(numpy_helper.from_array(dims, f"{new}/shape"))
            nodes[new] = helper.make_node("Reshape", [name, f"{new}/shape"], [new], name=new)
            return new
        inputs = [at_rank(each, rank) for each in node.input] if node and node.op_type in ("Cast", *_BROADCASTS) else [None]
        if None in inputs:
            return None
        nodes[new] = onnx.NodeProto()
        nodes[new].CopyFrom(node)
        nodes[new].input[:], nodes[new].output[:], nodes[new].name = inputs, [new], new
        return new

    for node in graph.node:
        for index, name in enumerate(node.input if node.op_type in _BROADCASTS else ()):
            rank = len(shapes[node.output[0]])
            if name in shapes and types[name].elem_type == TensorProto.FLOAT and 0 < len(shapes[name]) < rank:
                node.input[index] = at_rank(name, rank) or name
        nodes[node.output[0]] = node
    needed, kept = {value.name for value in graph.output}, []
    for node in reversed(nodes.values()):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))
