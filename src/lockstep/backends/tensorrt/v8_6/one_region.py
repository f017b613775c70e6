"""Have TensorRT 8.6 take a whole fp16 graph as one fused region at a low level.

Nodes that change no value are added for that. 8.6 gives its compiler of fused regions only those parts of a graph that
it expects to gain from; where a Gather of fp16 numbers makes the result, it gives it all. Levels 4 and 5 come to that
too, by trying many ways to divide the graph and building each. (Seen, not documented.) The Gather stands at an output,
where the last kernel writes through the index. On the vector of a norm's weights, which kernels of one row read in
their innermost loop, it made those slower.

As far as seen, a region has one floating type for all its inputs and outputs: a graph with fp16 and fp32 ones is
refused. So is one in which the parser must bring an fp32 operand to the rank of the other, since the layer that it puts
there gives fp16 in a region. Weights that take part in fp32 norms therefore come with their leading ones.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lockstep.onnx_tools.graph_types import prune, typed_values
from lockstep.onnx_tools.prepare import Prepared, check_same

LEVEL = 3  # at most: higher ones only search for what this gives at once
_BROADCASTS = ("Add", "Sub", "Mul", "Div")


def as_one_region(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a copy of the graph that TensorRT 8.6 takes as one fused region.

    Its last fp16 output [N, W] is element 0 of itself as [1, N, W]: the same bits. It is the last and not the first,
    which a block has in its midst: what follows that would be slower. An operand that is made of weights and constants,
    and is added, subtracted, multiplied or divided in fp32, has the rank of the other operand from the start. Returns
    None where there is no such output, or a Gather makes it already. Raises CheckError when the copy computes something
    else.
    """
    outputs = [
        value
        for value in model.graph.output
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16 and len(value.type.tensor_type.shape.dim) == 2
    ]
    if not outputs:
        return None
    name, width = outputs[-1].name, outputs[-1].type.tensor_type.shape.dim[1].dim_value
    if not width or any(node.op_type == "Gather" and name in node.output for node in model.graph.node):
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewritten = _bring_to_rank(copy)
    for node in copy.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}/all" if each == name else each for each in names]
    copy.graph.initializer.append(numpy_helper.from_array(np.array([1, -1, width], np.int64), f"{name}/shape"))
    copy.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), f"{name}/first"))
    copy.graph.node.append(
        helper.make_node("Reshape", [f"{name}/all", f"{name}/shape"], [f"{name}/cube"], name=f"{name}/reshape")
    )
    copy.graph.node.append(
        helper.make_node("Gather", [f"{name}/cube", f"{name}/first"], [name], name=f"{name}/gather", axis=0)
    )
    onnx.checker.check_model(copy, full_check=True)
    if rewritten:  # else nothing of what is computed
        check_same(model, Prepared(copy, [], {}))
    return copy


def _bring_to_rank(model: onnx.ModelProto) -> bool:
    """Give fp32 operands of weights and constants the rank of their result; return whether there was one."""
    graph = model.graph
    values = typed_values(model)
    shapes = {name: shape for name, (_, shape) in values.items()}
    floats = {name for name, (element, _) in values.items() if element == TensorProto.FLOAT}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    weights = {value.name for value in graph.input if all(shapes[value.name])}
    made = {output: node for node in graph.node for output in node.output}
    copies: list[onnx.NodeProto] = []
    done: set[str] = set()

    @functools.cache
    def fixed(name: str) -> bool:
        """Return whether a value is made of weights and constants alone, element by element."""
        node = made.get(name)
        return (
            name in weights
            or name in constants
            or bool(node and node.op_type in ("Cast", *_BROADCASTS) and all(map(fixed, node.input)))
        )

    def at_rank(name: str, rank: int) -> str:
        """Return the name of a value with leading ones; a scalar needs none."""
        new = f"{name}/rank {rank}"
        if not shapes[name]:
            return name
        if new in done:
            return new
        done.add(new)
        dims = [1] * (rank - len(shapes[name])) + shapes[name]
        if name in constants:
            graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(constants[name]).reshape(dims), new))
        elif name in weights:
            graph.initializer.append(numpy_helper.from_array(np.array(dims, np.int64), f"{new}/shape"))
            copies.append(helper.make_node("Reshape", [name, f"{new}/shape"], [new], name=new))
        else:
            inputs, node = [at_rank(each, rank) for each in made[name].input], onnx.NodeProto()
            node.CopyFrom(made[name])
            node.input[:], node.output[:], node.name = inputs, [new], new
            copies.append(node)
        return new

    for node in reversed(graph.node):  # so that what is copied is as it was
        for index, name in enumerate(node.input if node.op_type in _BROADCASTS else ()):
            rank = len(shapes.get(node.output[0], ()))
            if name in floats and 0 < len(shapes[name]) < rank and fixed(name):
                node.input[index] = at_rank(name, rank)
    nodes = [*copies, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    prune(graph, [value.name for value in graph.output])
    return bool(done)
