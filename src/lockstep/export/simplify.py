"""Bring a traced graph to packed form, without the leading batch dimension of 1 of transformers' modules.

In: a traced graph whose values are `[1, num_tokens, ...]`. Out: the same computation on `[num_tokens, ...]`, rebuilt
node by node. Each value has a full form and a short one (without the leading 1); either is made from the other on
demand. A node that no rule fits keeps its full form between an Unsqueeze and a Squeeze: unusual operators cost a node,
never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from lockstep.export.axes import ELEMENTWISE, REDUCTIONS, Operator, axes_of_inputs
from lockstep.export.movement import merge_movement, same_shape
from lockstep.onnx_tools.toolkit import constant, node_of
from lockstep.onnx_tools.values import array_of, attribute, required, shape_of

_ALONG_AXES = ELEMENTWISE.union(
    REDUCTIONS, "Concat LayerNormalization LogSoftmax MatMul RMSNormalization Slice Softmax Split Transpose".split()
)
_AXES_INPUTS = {"Slice": 3, **dict.fromkeys(REDUCTIONS, 1)}


def pack(model: ir.Model) -> ir.Model:
    """Return a new model without leading ones and idle movement, with the same input and output names."""
    packed = ir.Model(_Packer(model.graph).run(), ir_version=model.ir_version)
    # Movement first: values that differed by it alone are then equal nodes, which the next pass merges.
    merge_movement(packed.graph)
    passes.CommonSubexpressionEliminationPass()(packed)
    passes.RemoveUnusedNodesPass()(packed)
    return packed


class _Packer:
    def __init__(self, graph: ir.Graph):
        self.old = graph
        self.full: dict[ir.Value, ir.Value] = {}
        self.short: dict[ir.Value, ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.constants: dict[tuple, ir.Value] = {}

    def run(self) -> ir.Graph:
        inputs = [self._copy(value) for value in self.old.inputs]
        for value in self.old.initializers.values():
            assert value.name is not None  # initializers are registered by name
            self.initializers[value.name] = self._copy(value)
        for node in self.old:
            if not self._rewrite(node):
                self._keep(node)
        outputs = []
        for value in self.old.outputs:
            output = self._full(value)
            output.name = value.name
            outputs.append(output)
        return ir.Graph(
            inputs,
            outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports=dict(self.old.opset_imports),
            name=self.old.name,
        )

    def _copy(self, value: ir.Value) -> ir.Value:
        new = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
        self.full[value] = new
        return new

    # --- the two forms of a value ---

    def _full(self, value: ir.Value) -> ir.Value:
        if value not in self.full:
            self.full[value] = self._emit("Unsqueeze", [self.short[value], self._const([0])], value.shape, value.dtype)
        return self.full[value]

    def _short(self, value: ir.Value) -> ir.Value:
        if value not in self.short:
            array = array_of(value)
            if array is not None:
                self.short[value] = self._const(array[0])
            else:
                inputs = [self.full[value], self._const([0])]
                self.short[value] = self._emit("Squeeze", inputs, shape_of(value)[1:], value.dtype)
        return self.short[value]

    def _const(self, numbers: Sequence[int] | np.ndarray) -> ir.Value:
        array = numbers if isinstance(numbers, np.ndarray) else np.asarray(numbers, np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"packed_const_{len(self.constants)}"
            self.constants[key] = constant(name, array)
            self.initializers[name] = self.constants[key]
        return self.constants[key]

    def _emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        shape: Iterable[int | ir.SymbolicDim] | None,
        dtype: ir.DataType | None,
    ) -> ir.Value:
        self.nodes.append(node_of(op_type, inputs, shape, dtype))
        return self.nodes[-1].outputs[0]

    def _keep(self, node: ir.Node) -> None:
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            inputs.append(None if value is None else self._full(value))
        new = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            overload=node.overload,
            num_outputs=len(node.outputs),
        )
        self.nodes.append(new)
        for old, output in zip(node.outputs, new.outputs, strict=True):
            output.shape = old.shape
            output.type = old.type
            output.name = old.name
            self.full[old] = output

    # --- the rules ---

    def _has_leading_one(self, value: ir.Value | None) -> bool:
        """Return whether a value is computed and has a leading dimension of exactly 1; weights keep their shapes."""
        if value is None or value.shape is None or len(value.shape) < 2 or value.shape[0] != 1:
            return False
        return value.producer() is not None

    def _rewrite(self, node: ir.Node) -> bool:
        """Emit the node in short form if a rule fits; return whether all its outputs were made."""
        attribute_types = {attribute.type for attribute in node.attributes.values()}
        has_subgraph = not attribute_types.isdisjoint((ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS))
        if node.domain not in ("", "ai.onnx") or has_subgraph:
            return False
        if any(value is not None and value.shape is None for value in (*node.inputs, *node.outputs)):
            return False
        if node.op_type == "Reshape":
            return self._reshape(node)
        if node.op_type == "Gather" and self._has_leading_one(node.inputs[0]):
            return self._gather(node)
        if not all(self._has_leading_one(value) for value in node.outputs):
            return False
        if node.op_type == "Unsqueeze":
            return self._unsqueeze(node)
        return node.op_type in _ALONG_AXES and self._along_axes(node)

    def _emit_short(self, node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr]) -> bool:
        new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        self.nodes.append(new)
        for old, value in zip(node.outputs, new.outputs, strict=True):
            value.shape = ir.Shape(shape_of(old)[1:])
            value.type = old.type
            value.name = f"{old.name}/packed"
            self.short[old] = value
        return True

    def _along_axes(self, node: ir.Node) -> bool:
        """Emit an operator by the input axes of the leading output axis; axis attributes count from the end then."""
        operator = Operator.of(node)
        axes = axes_of_inputs(operator, 0) or ()
        is_matrix_product = node.op_type == "MatMul" and len(operator.outputs[0]) < 3  # its leading axis is the rows
        if 0 not in axes or is_matrix_product or not operator.attributes.get("keepdims", 1):
            return False
        inputs: list[ir.Value | None] = []
        for value, axis in zip(node.inputs, axes, strict=True):
            if value is None:
                inputs.append(None)
            elif axis is None:
                inputs.append(self._full(value))
            elif self._has_leading_one(value) or (array_of(value) is not None and shape_of(value)[0] == 1):
                inputs.append(self._short(value))
            else:
                return False
        attributes = list(node.attributes.values())
        if node.op_type == "Transpose":
            attributes = [ir.AttrInt64s("perm", [axis - 1 for axis in operator.attributes["perm"][1:]])]
        elif "axis" in operator.attributes:
            attributes = [attribute for attribute in attributes if attribute.name != "axis"]
            attributes.append(ir.AttrInt64("axis", operator.axis(0) - operator.rank))
        if node.op_type in _AXES_INPUTS:
            position = _AXES_INPUTS[node.op_type]
            numbers = operator.numbers(position)
            if not numbers:
                return False
            inputs[position] = self._const([number % operator.rank - operator.rank for number in numbers])
        return self._emit_short(node, inputs, attributes)

    def _gather(self, node: ir.Node) -> bool:
        data = required(node.inputs[0])
        out = node.outputs[0]
        axis = attribute(node, "axis", 0) % len(shape_of(data))
        index = array_of(node.inputs[1])
        if axis == 0 and index is not None and index.ndim == 0 and index == 0:  # x[0] is the short form of x
            self.full[out] = self._short(data)
            return True
        if axis == 0 or not self._has_leading_one(out):
            return False
        inputs = [self._short(data), self._full(required(node.inputs[1]))]
        return self._emit_short(node, inputs, [ir.AttrInt64("axis", axis - 1)])

    def _unsqueeze(self, node: ir.Node) -> bool:
        numbers = array_of(node.inputs[1])
        if numbers is None:
            return False
        data = required(node.inputs[0])
        out = node.outputs[0]
        axes = sorted(int(axis) % len(shape_of(out)) for axis in numbers)
        if 0 in axes:  # the new axis is the leading 1
            short = self._full(data)
        else:
            short = self._short(data)
        short_axes = [axis - 1 for axis in axes if axis != 0]
        if short_axes:
            short = self._emit("Unsqueeze", [short, self._const(short_axes)], shape_of(out)[1:], out.dtype)
        self.short[out] = short
        return True

    def _reshape(self, node: ir.Node) -> bool:
        """Emit a reshape, which keeps the order of elements: it may read and write short forms."""
        data = required(node.inputs[0])
        out = node.outputs[0]
        target = array_of(node.inputs[1])
        if target is None or not (self._has_leading_one(data) or self._has_leading_one(out)):
            return False
        source = self._short(data) if self._has_leading_one(data) else self._full(data)
        if self._has_leading_one(out):
            store = self.short
            shape = list(shape_of(out)[1:])
        else:
            store = self.full
            shape = list(shape_of(out))
        if same_shape(shape_of(source), shape):
            store[out] = source
            return True
        numbers = [dim if isinstance(dim, int) else -1 for dim in shape]
        if numbers.count(-1) > 1:
            return False
        store[out] = self._emit("Reshape", [source, self._const(numbers)], shape, out.dtype)
        return True
