"""cuBLAS GEMM of fp16 matrices with fp32 accumulation, through ctypes: no Python package is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.libraries import require_cublas

_WORKSPACE = 32 << 20  # bytes, as NVIDIA advises for Hopper
# cublas_api.h, library_types.h
_TRANSPOSE, _AS_IS, _FP16, _SUMS_FP32, _DEFAULT = 1, 0, 2, 68, -1
_STATUS = {1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
           13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR"}  # fmt: skip


class Gemm:
    """cuBLAS on one stream, with a workspace of its own."""

    def __init__(self, stream: cuda.Stream):
        self._library, self._stream = require_cublas(), stream
        self._handle, self._memory = ctypes.c_void_p(), cuda.empty((_WORKSPACE,), "u1", "cuBLAS to work in")
        if status := self._library.cublasCreate_v2(ctypes.byref(self._handle)):
            raise CheckError(
                f"expected the library cuBLAS ({self._library._name}) to start, found "
                f"{_said(status)}; free memory of the GPU, or name the folder of a cuBLAS for this driver in "
                "LD_LIBRARY_PATH"
            )
        cuda.destroy_with(self, self._library.cublasDestroy_v2, self._handle)
        self._check("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.handle))
        size = ctypes.c_size_t(_WORKSPACE)
        self._check("cublasSetWorkspace_v2", self._handle, ctypes.c_void_p(self._memory.address), size)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def bind(self, weight: cuda.Array, x: cuda.Array, out: cuda.Array) -> Callable[[int], None]:
        """Return a call that multiplies the first rows of x with a weight.

        The first rows of out [..., out_features] become x [..., in_features] times weight [out_features, in_features],
        transposed; the call is given their number.
        """
        out_features, in_features = weight.shape
        # column by column, as cuBLAS counts: out is [out_features, rows]
        front = self._handle, _TRANSPOSE, _AS_IS, out_features
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        a, b, c = (ctypes.c_void_p(array.address) for array in (weight, x, out))
        back = (
            in_features, one, a, _FP16, in_features, b, _FP16, in_features,
            zero, c, _FP16, out_features, _SUMS_FP32, _DEFAULT,
        )  # fmt: skip
        gemm = self._library.cublasGemmEx

        def multiply(rows: int, held: object = (self, weight, x, out)) -> None:
            """Multiply so many rows; `held` keeps the memory alive."""
            if status := gemm(*front, rows, *back):
                raise CheckError(f"cuBLAS: cublasGemmEx: {_said(status)}")

        return multiply

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CheckError(f"cuBLAS: {name}: {_said(status)}")


def _said(status: int) -> str:
    return f"CUBLAS_STATUS_{_STATUS[status]}" if status in _STATUS else f"status {status}"
