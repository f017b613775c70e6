"""Let a layer's own product compute its adapters' first product, too.

A becomes further rows of the layer's weight.

In: a graph whose blocks take adapters, its weight slots and what each is made of. For each y = x W^T and all x A_i of
the layers that are in it, the graph gets one product of x with W and behind it A_i^T, row by row, and a Split. Out: the
graph, and the slots: such a slot is made of its tensors and of the inputs A_i, which it is named by. A kernel that
decodes reads these rows with the others; of its own the first product takes as long as a kernel takes to start.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.artifacts.adapters import A_SUFFIX, BETWEEN, rows_of


def shrink_in_rows(
    model: onnx.ModelProto, parts: Mapping[str, list[str]]
) -> tuple[onnx.ModelProto, dict[str, list[str]]]:
    """Return a copy of `model` with A as rows of weights, and its slots.

    The slots are {slot: what it is made of}. Products whose weights lie the other way stay as they are.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph, mapping = copy.graph, dict(parts)
    declared = {value.name: value for value in graph.input}
    shrinks = {
        node.input[1]: node for node in graph.node if node.op_type == "Gemm" and node.input[1].endswith(A_SUFFIX)
    }
    gone: list[onnx.NodeProto] = []
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        slot = node.input[1] if node.op_type == "Gemm" and node.input[1] in parts else ""
        own = [part + A_SUFFIX for part in parts.get(slot, ()) if part + A_SUFFIX in shrinks]
        by_rows = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        if not own or not by_rows or any(shrinks[name].input[0] != node.input[0] for name in own):
            nodes.append(node)
            continue
        rows, deep = _shape(declared[slot])
        columns = [_shape(declared[name])[1] for name in own]
        name = BETWEEN.join([slot, *own])
        mapping = {key: value for key, value in mapping.items() if key != slot} | {name: [*parts[slot], *own]}
        element = declared[slot].type.tensor_type.elem_type
        declared[name] = helper.make_tensor_value_info(name, element, [rows + sum(columns), deep])
        _replace_inputs(graph, {slot, *own}, declared[name])
        nodes += _with_rows(graph, node, name, rows, columns, [shrinks[a].output[0] for a in own], element)
        gone += [shrinks[a] for a in own]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes if node not in gone]
    del graph.node[:]
    graph.node.extend(kept)
    del graph.value_info[:]
    onnx.checker.check_model(copy, full_check=True)
    return copy, mapping


def slot_rows(feeds: Mapping[str, np.ndarray], parts: list[str], slot: str) -> np.ndarray:
    """Return what a slot takes: its parts, one after another.

    Behind the others come the A that are rows of it, transposed.
    """
    rows = rows_of(slot)
    return np.concatenate([feeds[part].T if part in rows else feeds[part] for part in parts])


def _with_rows(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    slot: str,
    rows: int,
    columns: list[int],
    shrunk: list[str],
    element: int,
) -> list[onnx.NodeProto]:
    (out,) = node.output
    wide, sizes = f"{out}/wide", f"{out}/sizes"
    graph.initializer.append(numpy_helper.from_array(np.array([rows, *columns], np.int64), sizes))
    product = onnx.NodeProto()
    product.CopyFrom(node)
    product.input[1], product.output[0] = slot, wide
    split = helper.make_node("Split", [wide, sizes], [out, *shrunk], name=f"{out}/parts of rows", axis=1)
    if len(node.input) < 3:
        return [product, split]
    zero = numpy_helper.from_array(np.zeros(sum(columns), helper.tensor_dtype_to_np_dtype(element)), f"{out}/no bias")
    graph.initializer.append(zero)
    bias = helper.make_node("Concat", [node.input[2], zero.name], [f"{out}/bias"], name=f"{out}/bias with rows", axis=0)
    product.input[2] = f"{out}/bias"
    return [bias, product, split]


def _shape(value: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _replace_inputs(graph: onnx.GraphProto, names: set[str], by: onnx.ValueInfoProto) -> None:
    kept = [value for value in graph.input if value.name not in names]
    del graph.input[:]
    graph.input.extend([*kept, by])
