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
from onnx import helper

from lockstep.artifacts.adapters import IDS, mask_name
from lockstep.onnx_tools.rewriter import Rewriter


def ids_as_mask(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` that takes a mask; `model` itself where it takes no ids."""
    graph = Rewriter(model)
    if IDS not in graph.inputs:
        return model
    element, columns, rank = 0, 0, 0
    for node in graph.nodes:
        equal = graph.producers.get(node.input[0]) if node.op_type == "Where" else None
        if equal is None or equal.op_type != "Equal":
            continue
        columns, rank = adapter_columns(graph, equal)
        element = graph.constants[node.input[2]].data_type
        ids = graph.producers[equal.input[0]].input[0]  # of tokens, or of the rows of requests
        (out,) = node.output
        graph.replace(
            node,
            helper.make_node("Clip", [node.input[1], "least", "most"], [f"{out}/finite"], name=f"{out}/clip"),
            helper.make_node("Mul", [f"{out}/finite", mask_name(rank) if ids == IDS else ids], [out], f"{out}/mask"),
        )
    dtype = helper.tensor_dtype_to_np_dtype(element)
    most = np.array(np.finfo(dtype).max if dtype.kind == "f" else 3e38, dtype)
    graph.constant("least", -most)
    graph.constant("most", most)
    mask = helper.make_tensor_value_info(mask_name(rank), element, ["num_tokens", columns])
    for node in graph.consumers[IDS]:
        node.input[:] = [mask.name if name == IDS else name for name in node.input]
    graph.replace_input(IDS, mask)
    return graph.finish()


def adapter_columns(graph: Rewriter, equal: onnx.NodeProto) -> tuple[int, int]:
    """Return the number of columns that an Equal tells apart by their adapter, and how many each adapter has."""
    owners = graph.array(equal.input[1])
    assert owners is not None  # as `export.lora` writes it
    owners = owners.reshape(-1)
    return len(owners), int((owners == owners[0]).sum())


def mask_of(ids: np.ndarray, columns: int, rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the mask [num_tokens, columns] of adapter ids [num_tokens]."""
    return (ids[:, None] == np.arange(columns) // rank).astype(dtype)
