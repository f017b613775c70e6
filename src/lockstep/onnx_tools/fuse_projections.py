"""Let projections that share their input be one product: q, k and v; gate and up.

In: a graph whose weights are inputs (slots). Out: the same graph with one `Gemm(transB=1)` and a Split in place of
several, and for each slot of the new graph the slots that it is made of, one after another: a fused weight is the
parts' rows, in order, so that binding places the checkpoint's tensors side by side and nothing is converted.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import helper, numpy_helper


def fuse(model: onnx.ModelProto, slots: Collection[str]) -> tuple[onnx.ModelProto, dict[str, list[str]]]:
    """Return a copy of `model` with fused projections, and its slots.

    The slots are {slot: [slots of `model`]}; a slot that is not fused maps to itself.
    """
    fused = onnx.ModelProto()
    fused.CopyFrom(model)
    graph = fused.graph
    declared = {value.name: value for value in graph.input}
    mapping = {name: [name] for name in declared if name in slots}
    for group in _groups(graph, declared, set(slots)):
        first = group[0]
        bias = len(first.input) == 3
        names = []
        for position in (1, 2) if bias else (1,):
            parts = [node.input[position] for node in group]
            name = " + ".join(parts)
            mapping = {key: value for key, value in mapping.items() if key not in parts} | {name: parts}
            shapes = [[dim.dim_value for dim in declared[part].type.tensor_type.shape.dim] for part in parts]
            rows = [shape[0] for shape in shapes]
            element = declared[parts[0]].type.tensor_type.elem_type
            kept = [value for value in graph.input if value.name not in parts]
            kept.append(helper.make_tensor_value_info(name, element, [sum(rows), *shapes[0][1:]]))
            del graph.input[:]
            graph.input.extend(kept)
            names.append(name)
        sizes, whole = f"{first.name}/rows", f"{first.name}/fused"
        graph.initializer.append(numpy_helper.from_array(np.array(rows, np.int64), sizes))
        product = helper.make_node("Gemm", [first.input[0], *names], [whole], name=whole, transB=1)
        parts = helper.make_node(
            "Split", [whole, sizes], [node.output[0] for node in group], name=f"{first.name}/parts", axis=1
        )
        nodes = []
        for node in graph.node:
            if node == first:
                nodes += [product, parts]
            elif node not in group:
                nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)
    onnx.checker.check_model(fused, full_check=True)
    return fused, mapping


def _groups(graph: onnx.GraphProto, declared: dict, slots: set[str]) -> list[list[onnx.NodeProto]]:
    """Return groups of plain products of one value with weights.

    Nothing else reads these weights; a group has at least two products.
    """
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    found: dict[tuple, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type != "Gemm":
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        plain = (
            attributes.get("transB", 0) == 1
            and not attributes.get("transA", 0)
            and attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
        )
        weights = node.input[1:]
        if plain and all(name in slots and readers[name] == 1 for name in weights):
            one_dimensional = len(weights) < 2 or len(declared[weights[1]].type.tensor_type.shape.dim) == 1
            if one_dimensional:
                found.setdefault((node.input[0], len(weights)), []).append(node)
    return [group for group in found.values() if len(group) > 1]
