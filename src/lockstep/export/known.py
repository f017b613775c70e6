"""Shapes and types, which onnx_ir leaves optional, of the values of a trace.

There they are always set.
"""

from __future__ import annotations

import onnx_ir as ir

from lockstep.errors import InputError


def required(value: ir.Value | None) -> ir.Value:
    """Return an input that its operator cannot do without."""
    assert value is not None
    return value


def shape_of(value: ir.Value | None) -> ir.Shape:
    """Return the shape of a value, which the tracer has written down."""
    assert value is not None and value.shape is not None
    return value.shape


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the type of a value, which the tracer has written down."""
    assert value.dtype is not None
    return value.dtype


def number(dim: int | ir.SymbolicDim) -> int:
    """Return a dimension that the config decides. Raises InputError for one that a step decides."""
    if not isinstance(dim, int):
        raise InputError(f"cannot be split: expected a dimension of one size, found {dim}")
    return dim
