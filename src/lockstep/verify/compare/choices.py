"""Rows of a mixture whose experts are chosen by a hair: an engine that rounds elsewhere may choose others.

In: a graph. Out: one that also gives the scores of the experts that it chooses, and of the best that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import Rewriter, typed_values

_PREFIX = "scores of "


def with_scores(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with `scores of <choice>` [rows, experts of a token + 1] among its outputs, in descending order.

    The model itself where it chooses none.
    """
    if not any(node.op_type == "TopK" for node in model.graph.node):
        return model
    graph = Rewriter(model)
    types = typed_values(model)
    for node in graph.nodes:
        if node.op_type != "TopK" or node.output[1] not in graph.consumers:
            continue
        element, shape = types[node.input[0]]
        count = graph.array(node.input[1])
        if count is None or len(shape) != 2 or not isinstance(shape[1], int) or count[0] >= shape[1]:
            continue
        (places, name), more = (f"{node.output[1]}/more", f"{_PREFIX}{node.output[1]}"), int(count[0]) + 1
        number = graph.constant(f"{node.output[1]}/count", np.array([more], np.int64))
        scores = helper.make_node("TopK", [node.input[0], number], [f"{name}/as they are", places], axis=-1)
        cast = helper.make_node("Cast", [f"{name}/as they are"], [name], to=TensorProto.FLOAT)
        graph.replace(node, node, scores, cast)
        graph.outputs[name] = helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, more])
    return graph.finish()


def are_clear(outputs: Mapping[str, np.ndarray], bounds: Callable[[str], np.ndarray]) -> np.ndarray | None:
    """Return for which rows an engine within its bounds chooses the same experts; None where a graph chooses none.

    bounds: of an output by name, [rows], relative to the largest of a row.
    """
    clear = None
    for name, scores in outputs.items():
        if name.startswith(_PREFIX):
            chosen = scores[:, -2]
            other = scores[:, -1]
            found = ~(chosen - other <= bounds(name) * np.abs(scores[:, :-1]).max(axis=1))
            clear = found if clear is None else clear & found
    return clear
