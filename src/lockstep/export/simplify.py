"""Bring a traced graph to packed form.

It drops the leading batch dimension of 1 that transformers' modules carry.

In: a traced graph whose values are `[1, num_tokens, ...]`. Out: the same computation on `[num_tokens, ...]`, rebuilt
node by node. Each value has a full form and a short one (without the leading 1); whichever a node needs is made from
the other on demand, so a node that no rule fits keeps its full form between an Unsqueeze and a Squeeze: unusual
operators cost a node, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from lockstep.export.axes import ELEMENTWISE, REDUCTIONS, Operator, axes_of_inputs
from lockstep.export.known import array_of, axis_of, constant, node_of, required, shape_of
from lockstep.export.movement import merge_movement, same_shape

_ALONG_AXES = ELEMENTWISE.union(
    REDUCTIONS, "Concat LayerNormalization LogSoftmax MatMul RMSNormalization Slice Softmax Split Transpose".split()
)
_AXES_INPUTS = {"Slice": 3, **dict.fromkeys(REDUCTIONS, 1)}


def pack(model: ir.Model) -> ir.Model:
    """Return a new model without leading ones and idle movement, with the same names of inputs and outputs."""
    packed = ir.Model(_Packer(model.graph).run(), ir_version=model.ir_version)
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
            assert value.name is not None  # what it is registered by
            self.initializers[value.name] = self._copy(value)
        for node in self.old:
            if not self._rewrite(node):
                self._keep(node)
        outputs = []
        for value in self.old.outputs:
            outputs.append(self._full(value))
            outputs[-1].name = value.name
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports=dict(self.old.opset_imports),
            name=self.old.name,
        )
        return graph

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
                self.short[value] = self._emit(
                    "Squeeze", [self.full[value], self._const([0])], shape_of(value)[1:], value.dtype
                )
        return self.short[value]

    def _const(self, array: Sequence[int] | np.ndarray) -> ir.Value:
        array = np.asarray(array, dtype=np.int64 if isinstance(array, (list, tuple)) else None)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"packed_const_{len(self.constants)}"
            self.constants[key] = self.initializers[name] = constant(name, array)
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
        new = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else self._full(value) for value in node.inputs],
            list(node.attributes.values()),
            overload=node.overload,
            num_outputs=len(node.outputs),
        )
        self.nodes.append(new)
        for old, value in zip(node.outputs, new.outputs, strict=True):
            value.shape = old.shape
            value.type = old.type
            value.name = old.name
            self.full[old] = value

    # --- the rules ---

    def _leads(self, value: ir.Value | None) -> bool:
        """Return whether a value is computed and has a leading dimension of exactly 1."""
        if value is None or value.shape is None or len(value.shape) < 2 or value.shape[0] != 1:
            return False
        return value.producer() is not None

    def _rewrite(self, node: ir.Node) -> bool:
        """Emit the node in short form if a rule fits; return whether all its outputs are served."""
        if node.domain not in ("", "ai.onnx") or any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()
        ):
            return False
        if any(value is not None and value.shape is None for value in (*node.inputs, *node.outputs)):
            return False
        if node.op_type == "Reshape":
            return self._reshape(node)
        if node.op_type == "Gather" and self._leads(node.inputs[0]):
            return self._gather(node)
        if not all(self._leads(value) for value in node.outputs):
            return False
        if node.op_type == "Unsqueeze":
            return self._unsqueeze(node)
        return node.op_type in _ALONG_AXES and self._along_axes(node)

    def _serve(self, node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr]) -> bool:
        new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        self.nodes.append(new)
        for old, value in zip(node.outputs, new.outputs, strict=True):
            value.shape = ir.Shape(shape_of(old)[1:])
            value.type = old.type
            value.name = f"{old.name}/packed"
            self.short[old] = value
        return True

    def _along_axes(self, node: ir.Node) -> bool:
        """Emit an operator by the axes that go with the leading one; others are counted from the end."""
        operator = Operator.of(node)
        axes = axes_of_inputs(operator, 0) or ()
        rows = node.op_type == "MatMul" and len(operator.outputs[0]) < 3
        if 0 not in axes or rows or not operator.attributes.get("keepdims", 1):
            return False
        inputs: list[ir.Value | None] = []
        for value, axis in zip(node.inputs, axes, strict=True):
            if value is None or axis is None:
                inputs.append(None if value is None else self._full(value))
            elif self._leads(value) or (array_of(value) is not None and shape_of(value)[0] == 1):
                inputs.append(self._short(value))
            else:
                return False
        attributes = list(node.attributes.values())
        if node.op_type == "Transpose":
            attributes = [ir.AttrInt64s("perm", [place - 1 for place in operator.attributes["perm"][1:]])]
        elif "axis" in operator.attributes:
            attributes = [attribute for attribute in attributes if attribute.name != "axis"]
            attributes.append(ir.AttrInt64("axis", operator.axis(0) - operator.rank))
        if (position := _AXES_INPUTS.get(node.op_type)) is not None:
            numbers = operator.numbers(position)
            if not numbers:
                return False
            inputs[position] = self._const([number % operator.rank - operator.rank for number in numbers])
        return self._serve(node, inputs, attributes)

    def _gather(self, node: ir.Node) -> bool:
        data = required(node.inputs[0])
        out = node.outputs[0]
        axis = axis_of(node, 0) % len(shape_of(data))
        index = array_of(node.inputs[1])
        if axis == 0 and index is not None and index.ndim == 0 and index == 0:  # x[0]
            self.full[out] = self._short(data)
            return True
        if axis == 0 or not self._leads(out):
            return False
        return self._serve(
            node, [self._short(data), self._full(required(node.inputs[1]))], [ir.AttrInt64("axis", axis - 1)]
        )

    def _unsqueeze(self, node: ir.Node) -> bool:
        numbers = array_of(node.inputs[1])
        if numbers is None:
            return False
        data = required(node.inputs[0])
        out = node.outputs[0]
        axes = sorted(int(axis) % len(shape_of(out)) for axis in numbers)
        source = self._full(data) if 0 in axes else self._short(data)
        rest = [axis - 1 for axis in axes if axis != 0]
        self.short[out] = (
            self._emit("Unsqueeze", [source, self._const(rest)], shape_of(out)[1:], out.dtype) if rest else source
        )
        return True

    def _reshape(self, node: ir.Node) -> bool:
        """Emit a reshape, which keeps the element order: it may read and write short forms."""
        data = required(node.inputs[0])
        out = node.outputs[0]
        target = array_of(node.inputs[1])
        if target is None or not (self._leads(data) or self._leads(out)):
            return False
        source = self._short(data) if self._leads(data) else self._full(data)
        shape = list(shape_of(out)[1:] if self._leads(out) else shape_of(out))
        store = self.short if self._leads(out) else self.full
        if same_shape(shape_of(source), shape):
            store[out] = source
            return True
        static = [dim if isinstance(dim, int) else -1 for dim in shape]
        if static.count(-1) > 1:
            return False
        store[out] = self._emit("Reshape", [source, self._const(static)], shape, out.dtype)
        return True
