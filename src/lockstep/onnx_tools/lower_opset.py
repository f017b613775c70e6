"""Rewrite a canonical graph for a backend that reads older ONNX.

It becomes opset 17, with local functions inlined and axes as attributes.

In: a canonical graph (opset 20). Out: the same computation in opset 17. A backend that reads opset 20 needs none of
this. Each rule undoes one change between the opsets; an operator without a rule must mean the same in both, else
LoweringError names it. Source of the changes: the ONNX operator changelog.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx.inliner
from onnx import helper, numpy_helper

from lockstep.errors import InputError
from lockstep.onnx_tools.graph_types import keep_constants, typed_values

OPSET = 17
_REDUCTIONS = (
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSumSquare",
)


def lower(model: onnx.ModelProto, opset: int = OPSET) -> onnx.ModelProto:
    """Return a copy of `model` in `opset` (17).

    Raises InputError for another opset, and naming an operator that opset 17 does not have.
    """
    if opset != OPSET:
        raise InputError(f"opset: expected {OPSET}, or none for the graph as it is, found {opset!r}")
    lowered = onnx.inliner.inline_local_functions(model) if model.functions else _copy(model)
    graph = lowered.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [new for node in graph.node for new in _RULES.get(node.op_type, _keep)(node, constants)]
    del graph.node[:]
    graph.node.extend(nodes)
    keep_constants(graph, {name for node in graph.node for name in node.input})
    source = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    for node in graph.node:
        _check(node, source)
    del lowered.opset_import[:]
    lowered.opset_import.append(helper.make_opsetid("", OPSET))
    _casts_by_type(lowered)
    lowered.ir_version = 8  # of ONNX 1.12, which brought opset 17
    del graph.value_info[:]
    onnx.checker.check_model(lowered, full_check=True)
    return lowered


def _casts_by_type(model: onnx.ModelProto) -> None:
    """Turn each `CastLike` into a `Cast` to the type that is meant.

    Readers of opset 17 may not know it (TensorRT 8.6 does not).
    """
    if not any(node.op_type == "CastLike" for node in model.graph.node):
        return
    values = typed_values(model)
    for node in model.graph.node:
        if node.op_type == "CastLike":
            like = node.input.pop()
            node.op_type = "Cast"
            node.attribute.append(helper.make_attribute("to", values[like][0]))


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def _keep(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> Sequence[onnx.NodeProto]:
    return [node]


def _axes_to_attribute(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> Sequence[onnx.NodeProto]:
    """Make the axes of a reduction an attribute.

    Opset 18 made them an input. A reader of opset 17 ignores that input and reduces everything.
    """
    attributes = _attributes(node)
    no_axes = attributes.pop("noop_with_empty_axes", 0)
    axes = constants.get(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    if axes is None and (no_axes or len(node.input) > 1 and node.input[1]):
        raise InputError(
            f"{node.name}: {node.op_type}: expected constant axes, found "
            f"{'none' if no_axes else node.input[1]!r}; opset {OPSET} has axes as attributes"
        )
    if axes is not None:
        attributes["axes"] = [int(axis) for axis in axes]
    return [helper.make_node(node.op_type, [node.input[0]], node.output, name=node.name, **attributes)]


def _split_sizes(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> Sequence[onnx.NodeProto]:
    """Drop num_outputs of a Split, which opset 18 brought.

    Without it, equal parts are what Split makes when no sizes are given.
    """
    attributes = _attributes(node)
    attributes.pop("num_outputs", None)
    return [helper.make_node("Split", list(node.input), node.output, name=node.name, **attributes)]


def _without(*names: str) -> Callable[[onnx.NodeProto, Mapping[str, np.ndarray]], Sequence[onnx.NodeProto]]:
    """Return a rule that drops attributes which opset 17 does not know.

    Our graphs leave them at what opset 17 does.
    """

    def rule(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> Sequence[onnx.NodeProto]:
        return [
            helper.make_node(
                node.op_type,
                node.input,
                node.output,
                name=node.name,
                **{k: v for k, v in _attributes(node).items() if k not in names},
            )
        ]

    return rule


def _gelu(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> Sequence[onnx.NodeProto]:
    """Write Gelu, which came with opset 20, in older operators.

    x/2 (1 + erf(x/sqrt 2)), or x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    """
    x, out, base = node.input[0], node.output[0], node.name
    tanh = _attributes(node).get("approximate", b"none") == b"tanh"
    made: list[onnx.NodeProto] = []

    def scalar(value: float) -> str:
        name = f"{base}/{len(made)}"
        made.append(
            helper.make_node(
                "Constant", [], [f"{name}/float"], value=numpy_helper.from_array(np.array(value, np.float32))
            )
        )
        made.append(helper.make_node("CastLike", [f"{name}/float", x], [name]))
        return name

    def op(kind: str, *inputs: str, to: str | None = None) -> str:
        name = to or f"{base}/{len(made)}"
        made.append(helper.make_node(kind, list(inputs), [name], name=name))
        return name

    if tanh:
        cubed = op("Mul", op("Mul", x, x), op("Mul", x, scalar(0.044715)))
        inner = op("Tanh", op("Mul", op("Add", x, cubed), scalar((2 / np.pi) ** 0.5)))
    else:
        inner = op("Erf", op("Mul", x, scalar(0.5**0.5)))
    op("Mul", op("Mul", x, scalar(0.5)), op("Add", inner, scalar(1.0)), to=out)
    return made


_RULES: dict[str, Callable[[onnx.NodeProto, Mapping[str, np.ndarray]], Sequence[onnx.NodeProto]]] = {
    **dict.fromkeys(_REDUCTIONS, _axes_to_attribute),
    "Split": _split_sizes,
    "Gelu": _gelu,
    "Cast": _without("saturate"),
    "CastLike": _without("saturate"),
}


def _attributes(node: onnx.NodeProto) -> dict:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _check(node: onnx.NodeProto, source: int) -> None:
    """Check that a node's operator is one of opset 17.

    Where a later opset changed it, a rule above must have dealt with it. Raises InputError.
    """
    try:
        old = onnx.defs.get_schema(node.op_type, OPSET, node.domain)
    except onnx.defs.SchemaError:
        raise InputError(
            f"{node.name}: expected an operator of opset {OPSET}, found {node.op_type}; this "
            f"backend's version cannot run this model"
        ) from None
    unknown = sorted({attribute.name for attribute in node.attribute} - set(old.attributes))
    if unknown or len(node.input) > old.max_input:
        found = f"attributes {unknown}" if unknown else f"{len(node.input)} inputs"
        raise InputError(
            f"{node.name}: {node.op_type}: expected a form that opset {OPSET} has, found {found} of opset {source}"
        )
