"""Rewrite a canonical graph for a backend that reads older ONNX.

In: a canonical graph (opset 20). Out: the same computation in opset 17, with local functions inlined and axes as
attributes. Each rule undoes one change between the opsets; an operator without a rule must mean the same in both, else
an InputError names it. Source of the changes: the ONNX operator changelog.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from lockstep.errors import InputError
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, infer_types
from lockstep.onnx_tools.values import array_of, attribute, required

OPSET = 17
_REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare".split()
)


class Lower(Pass):
    """Write a graph in opset 17. Raises InputError for another opset, or an operator that opset 17 lacks."""

    def __init__(self, opset: int = OPSET):
        if opset != OPSET:
            raise InputError(f"opset: expected {OPSET}, or none for the graph as it is, found {opset!r}")

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        if model.functions:
            InlinePass()(model)
        source = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
        if any(node.op_type in ("CastLike", "Gelu") for node in graph):
            infer_types(model)
        for node in [*graph]:
            _lower(graph, node)
        for node in graph:
            if any(value.uses() or value.is_graph_output() for value in node.outputs):
                _check(node, source)
        model.opset_imports.clear()
        model.opset_imports[""] = OPSET
        model.ir_version = 8  # of ONNX 1.12, the first with opset 17
        return PassResult(model, True)


def _lower(graph: ir.Graph, node: ir.Node) -> None:
    writer = GraphWriter(graph, f"{node.name}/lowered", before=node)
    if node.op_type in _REDUCTIONS:
        _axes_to_attribute(writer, node)
    elif node.op_type == "Split":
        node.attributes.pop("num_outputs", None)  # without sizes opset 17 makes equal parts
    elif node.op_type == "Gelu":
        _gelu(writer, node)
    elif node.op_type == "Cast":
        node.attributes.pop("saturate", None)  # our graphs use what opset 17 does
    elif node.op_type == "CastLike":
        like = required(node.inputs[1])
        writer.op("Cast", node.inputs[0], name=node.name, to=like.dtype, replaces=node.outputs[0])


def _axes_to_attribute(writer: GraphWriter, node: ir.Node) -> None:
    """Make the axes of a reduction an attribute: a reader of opset 17 ignores the input and reduces all."""
    no_axes = attribute(node, "noop_with_empty_axes", 0)
    value = node.inputs[1] if len(node.inputs) > 1 else None
    axes = array_of(value)
    if axes is None and (no_axes or value is not None):
        actual = "none"
        if value is not None and not no_axes:
            actual = repr(value.name)
        raise InputError(
            f"{node.name}: {node.op_type}: expected constant axes, found {actual}; opset {OPSET} has axes as attributes"
        )
    settings: dict[str, Any] = {
        name: setting for name, setting in node.attributes.items() if name != "noop_with_empty_axes"
    }
    if axes is not None:
        settings["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in axes])
    writer.op(node.op_type, node.inputs[0], name=node.name, replaces=node.outputs[0], **settings)


def _gelu(writer: GraphWriter, node: ir.Node) -> None:
    """Write x/2 (1 + erf(x/sqrt 2)), or x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    x = required(node.inputs[0])
    assert x.dtype is not None  # `infer_types` ran
    dtype = x.dtype.numpy()

    def times(value: ir.Value, factor: float) -> ir.Value:
        return writer.op("Mul", value, np.array(factor, dtype))

    if attribute(node, "approximate", "none") == "tanh":
        cubed = writer.op("Mul", writer.op("Mul", x, x), times(x, 0.044715))
        inner = writer.op("Tanh", times(writer.op("Add", x, cubed), (2 / np.pi) ** 0.5))
    else:
        inner = writer.op("Erf", times(x, 0.5**0.5))
    constant_one = np.array(1.0, dtype)
    writer.op("Mul", times(x, 0.5), writer.op("Add", inner, constant_one), replaces=node.outputs[0])


def _check(node: ir.Node, source: int) -> None:
    """Raise InputError for an operator, or a form of it, that opset 17 lacks."""
    try:
        schema = onnx.defs.get_schema(node.op_type, OPSET, node.domain)
    except onnx.defs.SchemaError:
        raise InputError(
            f"{node.name}: expected an operator of opset {OPSET}, found {node.op_type}; this "
            f"backend's version cannot run this model"
        ) from None
    unknown = sorted(set(node.attributes) - set(schema.attributes))
    if unknown or len(node.inputs) > schema.max_input:
        actual = f"attributes {unknown}" if unknown else f"{len(node.inputs)} inputs"
        raise InputError(
            f"{node.name}: {node.op_type}: expected a form that opset {OPSET} has, found {actual} of opset {source}"
        )
