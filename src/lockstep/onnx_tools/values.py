"""Read the values and nodes of a graph that passes change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from lockstep.errors import InputError

T = TypeVar("T")


def required(item: T | None) -> T:
    """Return an input that its operator requires, or a node that is known to be there."""
    assert item is not None
    return item


def shape_of(value: ir.Value | None) -> ir.Shape:
    assert value is not None and value.shape is not None
    return value.shape


def sizes_of(value: ir.Value | None) -> list[int]:
    """Return the shape of an input, with 0 for a dynamic dimension."""
    return [size if isinstance(size, int) else 0 for size in shape_of(value)]


def dtype_of(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def number(dim: int | ir.SymbolicDim) -> int:
    """Return a dimension of fixed size. Raises InputError for one that depends on the step."""
    if not isinstance(dim, int):
        raise InputError(f"cannot be split: expected a dimension of one size, found {dim}")
    return dim


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def array_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of an initializer or a Constant node; None for any other value."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def maker(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node that computes a value; None for another operator's, an input or a constant."""
    if value is None:
        return None
    node = value.producer()
    if node is None or node.op_type not in op_types:
        return None
    return node


def is_linear(node: ir.Node) -> bool:
    """Return whether a node is x W^T, or x W^T + b: a plain `Gemm(transB=1)`."""
    return _is_gemm(node, 1)


def is_transposed(node: ir.Node) -> bool:
    """Return whether a node is x W, or x W + b, as GPT-2 has its linear layers: a plain `Gemm(transB=0)`."""
    return _is_gemm(node, 0)


def _is_gemm(node: ir.Node, trans_b: int) -> bool:
    defaults = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
    settings = {name: attribute(node, name, default) for name, default in defaults.items()}
    return node.op_type == "Gemm" and settings == {**defaults, "transB": trans_b}


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
            stack.extend(reads(node))
    return reached


def reads(node: ir.Node) -> Iterator[ir.Value | None]:
    yield from node.inputs
    # The body of a Scan or the branch of an If reads values of the graph around it that the node does not list.
    for branch in node.attributes.values():
        if branch.type == ir.AttributeType.GRAPH:
            for inner in branch.as_graph():
                yield from reads(inner)
