"""The one table of element types: their names and sizes in each library.

For safetensors, NumPy, PyTorch, graphs and ONNX; and the precisions of Lockstep. NumPy is imported inside functions:
documents are also read where nothing is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.errors import InputError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ElementType:
    """An element type of safetensors files.

    bits: of an element. name: in graphs, in NumPy (with ml_dtypes) and in PyTorch; None where the type is not supported
    yet. onnx: ONNX's name where it differs. precision: of a model whose weights are of this type. infinity: the bits of
    +infinity (all exponent bits set), of a floating-point type.
    """

    safetensors: str
    bits: int
    name: str | None = None
    infinity: int | None = None
    onnx: str | None = None
    precision: str | None = None


# In the order of the safetensors library's `Dtype` (src/tensor.rs): its writer places tensors from the last of these to
# the first, which keeps each of them aligned.
_TABLE = (
    ElementType("BOOL", 8, "bool"),
    ElementType("F4", 4),
    ElementType("F6_E2M3", 6),
    ElementType("F6_E3M2", 6),
    ElementType("U8", 8, "uint8"),
    ElementType("I8", 8, "int8"),
    ElementType("F8_E5M2", 8),
    ElementType("F8_E4M3", 8, "float8_e4m3fn", onnx="float8e4m3fn"),
    ElementType("F8_E8M0", 8),
    ElementType("I16", 16, "int16"),
    ElementType("U16", 16, "uint16"),
    ElementType("F16", 16, "float16", infinity=0x7C00, precision="fp16"),
    ElementType("BF16", 16, "bfloat16", infinity=0x7F80, precision="bf16"),
    ElementType("I32", 32, "int32"),
    ElementType("U32", 32, "uint32"),
    ElementType("F32", 32, "float32", infinity=0x7F80_0000, onnx="float", precision="fp32"),
    ElementType("C64", 64),
    ElementType("F64", 64, "float64", infinity=0x7FF0_0000_0000_0000, onnx="double"),
    ElementType("I64", 64, "int64"),
    ElementType("U64", 64, "uint64"),
)
# Types without a name are in the table too, so that a tensor of one is rejected with its type.
_NAMES = {entry.safetensors: entry.name for entry in _TABLE if entry.name is not None}
_ONNX_NAMES = {entry.onnx: entry.name for entry in _TABLE if entry.onnx is not None and entry.name is not None}
_FLOATS = sorted((entry for entry in _TABLE if entry.infinity is not None), key=lambda entry: -entry.bits)

# Keyed by safetensors' names.
DTYPE_BITS = {entry.safetensors: entry.bits for entry in _TABLE}
DTYPE_ORDER = {dtype: order for order, dtype in enumerate(DTYPE_BITS)}
FLOAT_DTYPES = tuple(entry.safetensors for entry in _FLOATS)
INFINITY_BITS = {entry.safetensors: entry.infinity for entry in _FLOATS if entry.infinity is not None}
INTEGER_DTYPES = tuple(name for name in _NAMES if name not in (*FLOAT_DTYPES, "F8_E4M3"))

# {precision: safetensors' name}, {precision: name in graphs, NumPy and PyTorch}, and the latter the other way round.
PRECISION_DTYPES = {entry.precision: entry.safetensors for entry in _FLOATS if entry.precision is not None}
PRECISION_NAMES = {precision: _NAMES[dtype] for precision, dtype in PRECISION_DTYPES.items()}
NAME_PRECISIONS = {name: precision for precision, name in PRECISION_NAMES.items()}


@dataclass(frozen=True)
class Quantization:
    """A precision whose linear weights are integers with one scale per group, or e4m3 numbers with one per row.

    bits: of the weights of layers. activation_bits: of the activations that they are multiplied with.
    """

    bits: int
    activation_bits: int
    is_fp8: bool = False


QUANTIZATIONS = {
    "w8a16": Quantization(8, 16),
    "w4a16": Quantization(4, 16),
    "w8a8": Quantization(8, 8),
    "w4a8": Quantization(4, 8),
    "w8a8-fp8": Quantization(8, 8, is_fp8=True),
}
HEAD_BITS = 8  # of the output head then, where nothing says another
GROUP_SIZES = (16, 32, 64, 128)
GROUP_SIZE = 32  # where nothing says another
ROW = 0  # as a group size: one scale a row, of e4m3 numbers
# {precision: name of the type that its graphs compute in and its other weights have}, of all precisions.
COMPUTE_NAMES = PRECISION_NAMES | dict.fromkeys(QUANTIZATIONS, "float32")


def base_precision(precision: str) -> str:
    """Return the precision of the tensors that are not quantised."""
    return NAME_PRECISIONS[COMPUTE_NAMES[precision]]


def has_8_bit_activations(precision: str) -> bool:
    """Return whether products with quantised weights round the activations to 8 bits."""
    return precision in QUANTIZATIONS and QUANTIZATIONS[precision].activation_bits == 8


def is_fp8(precision: str) -> bool:
    """Return whether quantised weights and their activations are e4m3 numbers."""
    return precision in QUANTIZATIONS and QUANTIZATIONS[precision].is_fp8


def graph_dtype(dtype: str) -> str:
    """Return the name of a safetensors dtype in graphs and NumPy: "float16" of "F16"."""
    return _NAMES.get(dtype, dtype)


def onnx_dtype(element: str) -> str:
    """Return the name of an ONNX element type in graphs and NumPy: "float32" of "FLOAT"."""
    return _ONNX_NAMES.get(element.lower(), element.lower())


def numpy_dtype(dtype: str) -> np.dtype:
    """Return the NumPy type of a safetensors dtype. Raises InputError for one that NumPy (with ml_dtypes) lacks."""
    name = _NAMES.get(dtype)
    if name is None:
        raise InputError(
            f"expected tensors of {', '.join(_NAMES)}, found {dtype}, which is not "
            f"supported yet; use a checkpoint of another type"
        )
    return named_dtype(name)


def named_dtype(name: str) -> np.dtype:
    """Return the NumPy type of a graph's dtype. Raises InputError for one of ml_dtypes, without it."""
    import numpy as np

    # `np.dtype(name)` cannot simply be tried: ml_dtypes registers its names with NumPy when it is imported.
    if name not in ("bfloat16", "int4", "float8_e4m3fn"):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise InputError(
            f"{name} needs the package ml_dtypes, which is not installed; install it or use fp16 or fp32 weights"
        ) from None
    return np.dtype(getattr(ml_dtypes, name))
