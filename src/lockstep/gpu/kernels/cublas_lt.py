"""cuBLASLt GEMM of fp16 matrices through ctypes, by algorithms that accumulate over the columns without a split."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.libraries import require_cublas

# cublasLt.h, library_types.h
_FP16, _FP32, _SUMS_FP32 = 2, 0, 68
_TRANSPOSE_FIRST, _WORKSPACE, _REDUCTIONS = 3, 1, 3  # attributes: of a description; of a preference
_SPLIT_K = 2  # attribute of an algorithm: into how many parts the columns are split
_STATUS = {1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
           13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR"}  # fmt: skip
_MOST = 16  # algorithms that cuBLAS is asked for at once
Algorithm = bytes  # cublasLtMatmulAlgo_t, which is opaque


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_byte * 64),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """cuBLASLt on the current device, without a workspace: no algorithm that is taken needs one."""

    def __init__(self) -> None:
        self._library = require_cublas()
        self._handle = ctypes.c_void_p()
        if status := self._library.cublasLtCreate(ctypes.byref(self._handle)):
            raise CheckError(
                f"expected the library cuBLASLt ({self._library._name}) to start, found {_said(status)}; free memory "
                "of the GPU, or name the folder of a cuBLAS for this driver in LD_LIBRARY_PATH"
            )
        cuda.destroy_with(self, self._library.cublasLtDestroy, self._handle)
        # column by column, as cuBLAS counts: out [out_features, rows] = weight, transposed, times x
        self._product = self._made("cublasLtMatmulDescCreate", ctypes.c_int(_SUMS_FP32), ctypes.c_int(_FP32))
        self._set("cublasLtMatmulDescSetAttribute", self._product, _TRANSPOSE_FIRST, ctypes.c_int32(1))
        self._preference = self._made("cublasLtMatmulPreferenceCreate")
        self._set("cublasLtMatmulPreferenceSetAttribute", self._preference, _WORKSPACE, ctypes.c_size_t(0))
        self._set("cublasLtMatmulPreferenceSetAttribute", self._preference, _REDUCTIONS, ctypes.c_uint32(0))
        self._layouts: dict[tuple[int, int], ctypes.c_void_p] = {}
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def algorithms(self, out_features: int, in_features: int, rows: int) -> Iterator[Algorithm]:
        """Yield the algorithms without a split that cuBLAS has for a size, the one that it takes for fastest first."""
        found, count = (_Found * _MOST)(), ctypes.c_int()
        weight, x, out = self._of(in_features, out_features), self._of(in_features, rows), self._of(out_features, rows)
        given = self._handle, self._product, weight, x, out, out, self._preference, _MOST, found, ctypes.byref(count)
        if self._library.cublasLtMatmulAlgoGetHeuristic(*given):
            return  # none for this size
        for each in found[: count.value]:
            split = ctypes.c_uint32()
            attribute = ctypes.byref(each.algorithm), _SPLIT_K, ctypes.byref(split), ctypes.c_size_t(4), None
            self._check("cublasLtMatmulAlgoConfigGetAttribute", *attribute)
            if not each.state and not each.workspace and split.value <= 1:
                yield bytes(each.algorithm)

    def bind(
        self, stream: cuda.Stream, weight: cuda.Array, x: cuda.Array, out: cuda.Array
    ) -> Callable[[int, Algorithm], None]:
        """Return a call that multiplies the first rows of x with a weight, by an algorithm.

        The first rows of out [..., out_features] become x [..., in_features] times weight [out_features, in_features],
        transposed. Raises CheckError where the algorithm does not run.
        """
        out_features, in_features = weight.shape
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        a, b, c = (ctypes.c_void_p(array.address) for array in (weight, x, out))
        of_weight, of_x = self._of(in_features, out_features), self._of
        matmul, nothing, queue = self._library.cublasLtMatmul, ctypes.c_size_t(0), ctypes.c_void_p(stream.handle)

        def multiply(rows: int, algorithm: Algorithm, held: object = (weight, x, out)) -> None:
            """Multiply so many rows; `held` keeps the memory alive."""
            to = of_x(out_features, rows)
            status = matmul(
                self._handle, self._product, one, a, of_weight, b, of_x(in_features, rows), zero, c, to, c, to,
                algorithm, None, nothing, queue,
            )  # fmt: skip
            if status:
                raise CheckError(f"cuBLAS: cublasLtMatmul: {_said(status)}")

        return multiply

    def _of(self, height: int, width: int) -> ctypes.c_void_p:
        """Return the description of fp16 [width, height], whose rows are columns to cuBLAS."""
        layout = self._layouts.get((height, width))
        if layout is None:
            sizes = ctypes.c_int(_FP16), ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height)
            layout = self._layouts[height, width] = self._made("cublasLtMatrixLayoutCreate", *sizes)
        return layout

    def _made(self, name: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(name, ctypes.byref(made), *arguments)
        return made

    def _set(self, name: str, of: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        self._check(name, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _check(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise CheckError(f"cuBLAS: {name}: {_said(status)}")


def _said(status: int) -> str:
    return f"CUBLAS_STATUS_{_STATUS[status]}" if status in _STATUS else f"status {status}"
