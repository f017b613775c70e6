"""Have TensorRT 8.6 take a whole fp16 graph as one fused region at a low optimization level, by a Gather that changes nothing.

8.6 gives its compiler of fused regions only those parts of a graph that it expects to gain from; where a Gather of fp16 numbers makes the result, it gives it
all. Levels 4 and 5 come to that too, by trying many ways to divide the graph and building each. (Seen, not documented.) The Gather stands at an output, where
the last kernel writes through the index. On the vector of a norm's weights, which kernels of one row read in their innermost loop, it made those slower.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LEVEL = 3  # at most: higher ones only search for what this gives at once


def as_one_region(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy whose last fp16 output [N, W] is element 0 of itself as [1, N, W]: the same bits. None where there is no such output, or a Gather makes it.

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
    for node in copy.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}/all" if each == name else each for each in names]
    copy.graph.initializer.append(numpy_helper.from_array(np.array([1, -1, width], np.int64), f"{name}/shape"))
    copy.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), f"{name}/first"))
    copy.graph.node.append(helper.make_node("Reshape", [f"{name}/all", f"{name}/shape"], [f"{name}/cube"], name=f"{name}/reshape"))
    copy.graph.node.append(helper.make_node("Gather", [f"{name}/cube", f"{name}/first"], [name], name=f"{name}/gather", axis=0))
    onnx.checker.check_model(copy, full_check=True)
    return copy
