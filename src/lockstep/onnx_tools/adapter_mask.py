"""Let a block read which adapter a token has as numbers instead of ids.

The numbers are what it multiplies the adapters' first products by.

In: a graph whose blocks take adapters, with y = x W^T + where(column's adapter == token's adapter, x A, 0) B. Out: the
same with clip(x A) * mask for the choice, and the input `adapter_mask.<rank>` [num_tokens, max_adapters * rank] in
place of `adapter_ids`: 1 in the columns of the token's adapter, else 0. TensorRT 8.6 ends the process where it is to
choose by integers inside a fused region. The clip keeps what another adapter makes of a token finite, so that 0 times
it is 0.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.artifacts.adapters import IDS, mask_name
from lockstep.onnx_tools.graph_types import prune


def ids_as_mask(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` that takes a mask.

    `model` itself where it takes no ids.
    """
    if IDS not in {value.name for value in model.graph.input}:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made = {node.output[0]: node for node in graph.node}
    element, columns, rank = 0, 0, 0
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        equal = made.get(node.input[0]) if node.op_type == "Where" else None
        if equal is None or equal.op_type != "Equal":
            nodes.append(node)
            continue
        owners = numpy_helper.to_array(constants[equal.input[1]]).reshape(-1)
        columns, rank = len(owners), int((owners == owners[0]).sum())
        element = constants[node.input[2]].data_type
        (ids,) = made[equal.input[0]].input[:1]  # of tokens, or of the rows of requests
        mask = mask_name(rank) if ids == IDS else ids
        (out,) = node.output
        nodes.append(helper.make_node("Clip", [node.input[1], "least", "most"], [f"{out}/finite"], name=f"{out}/clip"))
        nodes.append(helper.make_node("Mul", [f"{out}/finite", mask], [out], name=f"{out}/mask"))
    dtype = helper.tensor_dtype_to_np_dtype(element)
    most = np.array(np.finfo(dtype).max if dtype.kind == "f" else 3e38, dtype)
    graph.initializer.extend([numpy_helper.from_array(-most, "least"), numpy_helper.from_array(most, "most")])
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    for node in kept:
        node.input[:] = [mask_name(rank) if name == IDS else name for name in node.input]
    del graph.node[:]
    graph.node.extend(kept)
    prune(graph, [value.name for value in graph.output])
    inputs = [
        helper.make_tensor_value_info(mask_name(rank), element, ["num_tokens", columns]) if value.name == IDS else value
        for value in graph.input
    ]
    inputs = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in inputs]
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    onnx.checker.check_model(copy, full_check=True)
    return copy


def mask_of(ids: np.ndarray, columns: int, rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the mask [num_tokens, columns] of adapter ids [num_tokens]."""
    return (ids[:, None] == np.arange(columns) // rank).astype(dtype)
