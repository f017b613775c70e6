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
from onnx import TensorProto, helper

from lockstep.onnx_tools.prepare import Prepared, check_same
from lockstep.onnx_tools.rewriter import Rewriter, typed_values

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
    graph = Rewriter(model)
    is_rewritten = _bring_to_rank(graph)
    for node in graph.nodes:
        for names in (node.input, node.output):
            names[:] = [f"{name}/all" if other == name else other for other in names]
    cube = graph.constant(f"{name}/shape", np.array([1, -1, width], np.int64))
    first = graph.constant(f"{name}/first", np.array(0, np.int64))
    graph.append(
        helper.make_node("Reshape", [f"{name}/all", cube], [f"{name}/cube"], name=f"{name}/reshape"),
        helper.make_node("Gather", [f"{name}/cube", first], [name], name=f"{name}/gather", axis=0),
    )
    region = graph.finish()
    if is_rewritten:  # else nothing of what is computed
        check_same(model, Prepared(region, [], {}))
    return region


def _bring_to_rank(graph: Rewriter) -> bool:
    """Give fp32 operands of weights and constants the rank of their result; return whether there was one."""
    values = typed_values(graph.model)
    shapes = {name: shape for name, (_, shape) in values.items()}
    floats = {name for name, (element, _) in values.items() if element == TensorProto.FLOAT}
    weights = {name for name in graph.inputs if all(graph.shape(name))}
    done: set[str] = set()

    @functools.cache
    def fixed(name: str) -> bool:
        """Return whether a value is made of weights and constants alone, element by element."""
        node = graph.producers.get(name)
        return (
            name in weights
            or name in graph.constants
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
        dims = [1] * (rank - len(shapes[name])) + [int(size) for size in shapes[name]]
        if (array := graph.array(name)) is not None:
            graph.constant(new, array.reshape(dims))
        elif name in weights:
            shape = graph.constant(f"{new}/shape", np.array(dims, np.int64))
            graph.prepend(helper.make_node("Reshape", [name, shape], [new], name=new))
        else:
            node = onnx.NodeProto()
            node.CopyFrom(graph.producers[name])
            node.input[:], node.output[:], node.name = [at_rank(other, rank) for other in node.input], [new], new
            graph.prepend(node)
        return new

    for node in reversed(graph.nodes):  # so that what is copied is as it was
        for index, name in enumerate(node.input if node.op_type in _BROADCASTS else ()):
            rank = len(shapes.get(node.output[0], ()))
            if name in floats and 0 < len(shapes[name]) < rank and fixed(name):
                node.input[index] = at_rank(name, rank)
    return bool(done)
