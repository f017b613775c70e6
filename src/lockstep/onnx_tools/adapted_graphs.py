"""Rewrite graphs with adapter inputs (`export.lora`) into other forms.

A linear layer there is y = x W^T + where(column's adapter == token's adapter, x A, 0) B. Each pass returns a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, BETWEEN, IDS, mask_name, rows_of
from lockstep.onnx_tools.rewriter import Emitter, Rewriter, attributes_of


def ids_as_mask(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let blocks read a token's adapter as a mask that multiplies the first products, instead of ids.

    The copy masks with clip(x A) * mask, and has the input `adapter_mask.<rank>` [num_tokens, max_adapters * rank]
    instead of `adapter_ids`: 1 in the columns of the token's adapter, else 0. One version of TensorRT crashed on
    comparing integers inside a fused region; later ones were not tried. The clip keeps another adapter's result for a
    token finite, so that 0 times it is 0. Returns `model` itself if it has no ids.
    """
    graph = Rewriter(model)
    if IDS not in graph.inputs:
        return model
    element = 0
    columns = 0
    rank = 0
    for node in graph.nodes:
        equal = graph.producers.get(node.input[0]) if node.op_type == "Where" else None
        if equal is None or equal.op_type != "Equal":
            continue
        columns, rank = adapter_columns(graph, equal)
        element = graph.constants[node.input[2]].data_type
        ids = graph.producers[equal.input[0]].input[0]  # of tokens, or of the rows of requests
        dtype = helper.tensor_dtype_to_np_dtype(element)
        largest = np.array(np.finfo(dtype).max if dtype.kind == "f" else 3e38, dtype)
        emit = Emitter(graph, f"{node.output[0]}/finite")
        finite = emit("Clip", node.input[1], -largest, largest)
        emit("Mul", finite, mask_name(rank) if ids == IDS else ids, result=node.output[0])
        graph.replace(node, *emit.nodes)
    mask = helper.make_tensor_value_info(mask_name(rank), element, ["num_tokens", columns])
    for node in graph.consumers[IDS]:
        node.input[:] = [mask.name if name == IDS else name for name in node.input]
    graph.replace_input(IDS, mask)
    return graph.finish()


def adapter_columns(graph: Rewriter, equal: onnx.NodeProto) -> tuple[int, int]:
    """Return the number of columns that an Equal assigns to adapters, and the rank: the columns of each adapter."""
    owners = graph.array(equal.input[1])
    assert owners is not None  # as `export.lora` writes it
    owners = owners.reshape(-1)
    return len(owners), int((owners == owners[0]).sum())


def mask_of(ids: np.ndarray, columns: int, rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the mask [num_tokens, columns] of adapter ids [num_tokens]."""
    return (ids[:, None] == np.arange(columns) // rank).astype(dtype)


def shrink_in_rows(
    model: onnx.ModelProto, parts: Mapping[str, list[str]]
) -> tuple[onnx.ModelProto, dict[str, list[str]]]:
    """Let a layer's product also compute its adapters' first products: A becomes additional rows of its weight.

    The copy has one product of x with the rows of W and then those of each A_i^T, and a Split. The slot's parts are
    those in `parts` and the inputs A_i, which are in its name. A kernel that decodes reads these rows with the others;
    a separate first product takes as long as a kernel launch. Transposed weights do not change.
    """
    graph = Rewriter(model)
    slots = dict(parts)
    products = [node for node in graph.nodes if node.op_type == "Gemm"]
    shrinks = {node.input[1]: node for node in products if node.input[1].endswith(A_SUFFIX)}
    for node in products:
        slot = node.input[1]
        names = [part + A_SUFFIX for part in parts.get(slot, ()) if part + A_SUFFIX in shrinks]
        is_transposed = bool(attributes_of(node).get("transB"))
        if not names or not is_transposed or any(shrinks[name].input[0] != node.input[0] for name in names):
            continue
        rows, in_features = graph.shape(slot)
        columns = [graph.shape(name)[1] for name in names]
        shape = [rows + sum(columns), in_features]
        joined = graph.input(BETWEEN.join([slot, *names]), graph.element(slot), shape)
        slots[joined] = [*slots.pop(slot), *names]
        for name in names:
            graph.replace(shrinks[name])
        (out,) = node.output
        outputs = [out, *(shrinks[name].output[0] for name in names)]
        bias = Emitter(graph, f"{out}/bias")
        split = Emitter(graph, out)
        node.input[1] = joined
        node.output[0] = f"{out}/wide"
        split.several("Split", node.output[0], [rows, *columns], results=outputs, axis=1)
        if len(node.input) > 2:
            dtype = helper.tensor_dtype_to_np_dtype(graph.element(slot))
            node.input[2] = bias("Concat", node.input[2], np.zeros(sum(columns), dtype), axis=0)
        graph.replace(node, *bias.nodes, node, *split.nodes)
    return graph.finish(), slots


def slot_rows(feeds: Mapping[str, np.ndarray], parts: list[str], slot: str) -> np.ndarray:
    """Return a slot's array: its parts, one after another, with the A among its rows transposed."""
    rows = rows_of(slot)
    return np.concatenate([feeds[part].T if part in rows else feeds[part] for part in parts])


def is_expand(node: onnx.NodeProto) -> bool:
    """Return whether a node is the second product of adapters, which is added to a layer's result."""
    return node.op_type == "Gemm" and node.input[1].endswith(B_SUFFIX)


def without_adapters(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the adapters from a graph, which then computes what the model without adapters does."""
    graph = Rewriter(model)
    for expand in filter(is_expand, graph.nodes):
        (total,) = graph.consumers[expand.output[0]]
        (base,) = (name for name in total.input if name != expand.output[0])
        outputs = graph.producers[base].output
        outputs[:] = [total.output[0] if name == base else name for name in outputs]
        graph.replace(total)
    return graph.finish()
