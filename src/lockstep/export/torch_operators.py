"""How torch operators are translated in a trace: the exporter's own table, and our overrides."""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset20
from onnxscript.function_libs.torch_lib.ops.core import aten_slice_scatter
from onnxscript.function_libs.torch_lib.registration import torch_op
from torch.onnx._internal.exporter._registration import ONNXRegistry

from lockstep.errors import InputError

OPSET = 20


def _ints(*values: int) -> Any:
    """Return a constant, untyped: onnxscript's annotation covers every type that a constant can have."""
    return opset20.Constant(value_ints=list(values))


def _gemm(rows, weight, bias):  # type: ignore[no-untyped-def]  # onnxscript reads annotations as types of ONNX
    if bias is None:
        return opset20.Gemm(rows, weight, transB=1)
    return opset20.Gemm(rows, weight, bias, transB=1)


def _to_gemm(x, weight, bias=None):  # type: ignore[no-untyped-def]  # as above
    """Translate aten.linear to Gemm(transB=1): the weight stays [out_features, in_features]."""
    out_features, in_features = weight.shape
    if len(x.shape) == 2:
        return _gemm(x, weight, bias)
    leading_dims = [0] * (len(x.shape) - 1)  # 0 copies the input's dimension
    if len(x.shape) == 3:  # [1, num_tokens, in_features]
        leading_dims = [1, -1]
    rows = opset20.Reshape(x, _ints(-1, int(in_features)))
    rows = _gemm(rows, weight, bias)
    return opset20.Reshape(rows, _ints(*leading_dims, int(out_features)))


def _to_atanh(x, beta=1.0, threshold=20.0):  # type: ignore[no-untyped-def]  # as above
    """Translate aten.softplus, max(x, 0) + log1p(y) of y = exp(-|x|), whose log1p is 2 atanh(y / (y + 2)).

    Softplus and Log of ONNX Runtime round by position in the tensor, and lose a y that is small against 1.
    """
    if beta != 1.0:
        raise InputError(f"it computes softplus with beta={beta}, expected 1")
    dtype = x.dtype
    x = opset20.Cast(x, to=ir.DataType.FLOAT)
    two = opset20.Constant(value_float=2.0)
    small = opset20.Exp(opset20.Neg(opset20.Abs(x)))
    log1p = opset20.Mul(opset20.Atanh(opset20.Div(small, opset20.Add(small, two))), two)
    return opset20.Cast(opset20.Add(opset20.Relu(x), log1p), to=dtype)


def to_concat(x, src, dim=0, start=None, end=None, step=1):  # type: ignore[no-untyped-def]  # as above
    """Translate aten.slice_scatter to Concat; the exporter puts a ScatterND between two Transposes of the whole."""
    size = x.shape[dim]
    if step != 1 or not all(number is None or isinstance(number, int) for number in (start, end, size)):
        return aten_slice_scatter(x, src, dim, start, end, step)
    first, last, _ = slice(start, end).indices(size)
    parts = [src]
    if first:
        # If the scatter before this one wrote exactly the part before, take its source instead of slicing.
        before = x.producer()
        written = x
        if before is not None and before.op_type == "Concat":
            written = before.inputs[0]
        if written.shape is None or written.shape[dim] != first:
            written = opset20.Slice(x, _ints(0), _ints(first), _ints(dim))
        parts.insert(0, written)
    if last < size:
        parts.append(opset20.Slice(x, _ints(last), _ints(size), _ints(dim)))
    return opset20.Identity(src) if len(parts) == 1 else opset20.Concat(*parts, axis=dim)


@torch_op("aten::unsqueeze", complex=True, trace_only=True)
def _complex_unsqueeze(x, dim: int):  # type: ignore[no-untyped-def]  # as above
    """Translate Unsqueeze of a complex tensor, which is stored as pairs of real numbers in an extra last dimension."""
    return opset20.Unsqueeze(x, _ints(dim if dim >= 0 else dim - 1))


@functools.cache
def torch_operators() -> ONNXRegistry:
    registry = ONNXRegistry.from_torchlib(OPSET)
    registry.register_op(torch.ops.aten.linear.default, _to_gemm)
    registry.register_op(torch.ops.aten.softplus.default, _to_atanh)
    registry.register_op(torch.ops.aten.slice_scatter.default, to_concat)
    return registry
