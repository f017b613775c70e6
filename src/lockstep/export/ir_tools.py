"""Helpers of passes over onnx_ir graphs: shapes and types, which a trace always has, new values, nodes and graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.errors import InputError


def required(value: ir.Value | None) -> ir.Value:
    """Return an input that its operator requires."""
    assert value is not None
    return value


def shape_of(value: ir.Value | None) -> ir.Shape:
    assert value is not None and value.shape is not None
    return value.shape


def dtype_of(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def number(dim: int | ir.SymbolicDim) -> int:
    """Return a dimension of fixed size. Raises InputError for one that depends on the step."""
    if not isinstance(dim, int):
        raise InputError(f"cannot be split: expected a dimension of one size, found {dim}")
    return dim


def axis_of(node: ir.Node, default: int) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else default


def array_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of an initializer or a Constant node; None for any other value."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def constant(name: str, array: np.ndarray) -> ir.Value:
    """Return an initializer, not yet registered in a graph."""
    dtype = ir.DataType.from_numpy(array.dtype)
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor)


def node_of(
    op_type: str, inputs: Sequence[ir.Value], shape: Dims, dtype: ir.DataType | None, attributes: Sequence[ir.Attr] = ()
) -> ir.Node:
    """Return a node with one output of this shape and type, not yet in a graph."""
    node = ir.Node("", op_type, inputs, attributes, num_outputs=1)
    if shape is not None:
        node.outputs[0].shape = ir.Shape(shape)
    if dtype is not None:
        node.outputs[0].type = ir.TensorType(dtype)
    return node


def upstream(values: Iterable[ir.Value], stops: Collection[ir.Value | ir.Node] = ()) -> set[ir.Value]:
    """Return `values` and everything they depend on, up to values in `stops` and outputs of nodes in `stops`."""
    reached: set[ir.Value] = set()
    stack: list[ir.Value | None] = [*values]
    while stack:
        value = stack.pop()
        if value is None or value in reached or value.producer() in stops:
            continue
        reached.add(value)
        node = value.producer()
        if node is not None and value not in stops:
            stack.extend(node.inputs)
    return reached


class GraphWriter:
    """Adds operators to `graph`, whose operands are values or constants: arrays and lists of integers.

    prefix: of the names of constants. after: the node that they follow; None: the end of the graph.
    """

    def __init__(self, graph: ir.Graph, prefix: str, after: ir.Node | None = None):
        self.graph = graph
        self._prefix = prefix
        self._last = after

    def op(
        self, op_type: str, *inputs: Operand, shape: Dims = None, dtype: ir.DataType | None = None, **attributes: Any
    ) -> ir.Value:
        values = [value if isinstance(value, ir.Value) else self._constant(np.asarray(value)) for value in inputs]
        node = node_of(op_type, values, shape, dtype, ir.convenience.convert_attributes(attributes))
        if self._last is None:
            self.graph.append(node)
        else:
            self.graph.insert_after(self._last, node)
            self._last = node
        return node.outputs[0]

    def _constant(self, array: np.ndarray) -> ir.Value:
        number = 1
        while (name := f"{self._prefix}_const_{number}") in self.graph.initializers:
            number += 1
        initializer = constant(name, array)
        self.graph.register_initializer(initializer)
        return initializer


Dims = Iterable[int | ir.SymbolicDim | str | None] | None
Operand = ir.Value | Sequence[int] | np.ndarray | np.generic
