"""Rewrite a canonical graph for a backend that reads older ONNX.

In: a canonical graph (opset 20). Out: the same computation in opset 17, with local functions inlined and axes as
attributes. Each rule undoes one change between the opsets; an operator without a rule must mean the same in both, else
an InputError names it. Source of the changes: the ONNX operator changelog.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.inliner
from onnx import NodeProto, helper

from lockstep.errors import InputError
from lockstep.onnx_tools.rewriter import Emitter, Rewriter, attributes_of, typed_values

OPSET = 17
_REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare".split()
)


def lower(model: onnx.ModelProto, opset: int = OPSET) -> onnx.ModelProto:
    """Return a copy in opset 17. Raises InputError for another opset, or an operator that opset 17 lacks."""
    if opset != OPSET:
        raise InputError(f"opset: expected {OPSET}, or none for the graph as it is, found {opset!r}")
    inlined = onnx.inliner.inline_local_functions(model) if model.functions else model
    graph = Rewriter(inlined)
    rules = _Rules(graph, inlined)
    source = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    for node in graph.nodes:
        nodes = rules.lowered(node)
        for lowered in nodes:
            _check(lowered, source)
        graph.replace(node, *nodes)
    graph.set_opset(OPSET)
    graph.model.ir_version = 8  # of ONNX 1.12, the first with opset 17
    return graph.finish()


class _Rules:
    def __init__(self, graph: Rewriter, model: onnx.ModelProto):
        self._graph = graph
        self._model = model

    @functools.cached_property
    def _types(self) -> dict[str, int]:
        return {name: element for name, (element, _) in typed_values(self._model).items()}

    def lowered(self, node: NodeProto) -> Sequence[NodeProto]:
        if node.op_type in _REDUCTIONS:
            return self._axes_to_attribute(node)
        if node.op_type == "Split":
            return _without(node, "num_outputs")  # without sizes opset 17 makes equal parts
        if node.op_type == "Gelu":
            return self._gelu(node)
        if node.op_type == "Cast":
            return _without(node, "saturate")  # our graphs use what opset 17 does
        if node.op_type == "CastLike":
            return self._cast_by_type(node)
        return [node]

    def _axes_to_attribute(self, node: NodeProto) -> Sequence[NodeProto]:
        """Make the axes of a reduction an attribute: a reader of opset 17 ignores the input and reduces all."""
        attributes = attributes_of(node)
        no_axes = attributes.pop("noop_with_empty_axes", 0)
        name = node.input[1] if len(node.input) > 1 else ""
        axes = self._graph.array(name)
        if axes is None and (no_axes or name):
            raise InputError(
                f"{node.name}: {node.op_type}: expected constant axes, found {'none' if no_axes else name!r}; "
                f"opset {OPSET} has axes as attributes"
            )
        if axes is not None:
            attributes["axes"] = [int(axis) for axis in axes]
        return [helper.make_node(node.op_type, node.input[:1], node.output, name=node.name, **attributes)]

    def _cast_by_type(self, node: NodeProto) -> Sequence[NodeProto]:
        """Turn a `CastLike` into a `Cast` to the type of its second input."""
        to = self._types[node.input[1]]
        return [helper.make_node("Cast", node.input[:1], node.output, name=node.name, to=to)]

    def _gelu(self, node: NodeProto) -> Sequence[NodeProto]:
        """Write x/2 (1 + erf(x/sqrt 2)), or x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
        x = node.input[0]
        emit = Emitter(self._graph, node.name)
        dtype = helper.tensor_dtype_to_np_dtype(self._types[x])

        def times(value: str, factor: float) -> str:
            return emit("Mul", value, np.array(factor, dtype))

        if attributes_of(node).get("approximate", b"none") == b"tanh":
            cubed = emit("Mul", emit("Mul", x, x), times(x, 0.044715))
            inner = emit("Tanh", times(emit("Add", x, cubed), (2 / np.pi) ** 0.5))
        else:
            inner = emit("Erf", times(x, 0.5**0.5))
        emit("Mul", times(x, 0.5), emit("Add", inner, np.array(1.0, dtype)), result=node.output[0])
        return emit.nodes


def _without(node: NodeProto, name: str) -> Sequence[NodeProto]:
    """Drop an attribute that opset 17 does not have."""
    attributes = {key: value for key, value in attributes_of(node).items() if key != name}
    return [helper.make_node(node.op_type, node.input, node.output, name=node.name, **attributes)]


def _check(node: NodeProto, source: int) -> None:
    """Raise InputError for an operator, or a form of it, that opset 17 lacks."""
    try:
        schema = onnx.defs.get_schema(node.op_type, OPSET, node.domain)
    except onnx.defs.SchemaError:
        raise InputError(
            f"{node.name}: expected an operator of opset {OPSET}, found {node.op_type}; this "
            f"backend's version cannot run this model"
        ) from None
    unknown = sorted({attribute.name for attribute in node.attribute} - set(schema.attributes))
    if unknown or len(node.input) > schema.max_input:
        actual = f"attributes {unknown}" if unknown else f"{len(node.input)} inputs"
        raise InputError(
            f"{node.name}: {node.op_type}: expected a form that opset {OPSET} has, found {actual} of opset {source}"
        )
