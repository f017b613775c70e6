"""The element types of safetensors files: their sizes, their NumPy types, and the precisions Lockstep stores weights
in. NumPy is imported where a type of its own is asked for: documents are also read where nothing is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import InputError

if TYPE_CHECKING:
    import numpy as np

# Bits an element, in the order of the safetensors library's `Dtype` (src/tensor.rs): its writer places tensors from the
# last of these to the first, which keeps each of them aligned.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
DTYPE_ORDER = {dtype: order for order, dtype in enumerate(DTYPE_BITS)}

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
INTEGER_DTYPES = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
PRECISION_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}

_NUMPY_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


def graph_dtype(dtype: str) -> str:
    """The name graphs and NumPy use for a safetensors dtype: "F16" -> "float16". A type without one keeps its own
    name."""
    return _NUMPY_NAMES.get(dtype, dtype)


def numpy_dtype(dtype: str) -> np.dtype:
    """The NumPy type of a safetensors dtype, `ml_dtypes.bfloat16` for BF16.

    Raises InputError for types that NumPy lacks (fp8 and smaller), and for BF16 where `ml_dtypes` is not installed.
    """
    name = _NUMPY_NAMES.get(dtype)
    if name is None:
        raise InputError(
            f"expected tensors of {', '.join(_NUMPY_NAMES)}, found {dtype}, which is not "
            f"supported yet; use a checkpoint of another type"
        )
    return named_dtype(name)


def named_dtype(name: str) -> np.dtype:
    """The NumPy type of a graph's dtype, `ml_dtypes.bfloat16` for "bfloat16".

    Raises InputError for bfloat16 where `ml_dtypes` is not installed.
    """
    import numpy as np

    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise InputError(
            "bf16 weights need the package ml_dtypes, which is not installed; install it or use fp16 or fp32 weights"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)
