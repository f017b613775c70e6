"""cuBLASLt GEMM of fp16 or e4m3 matrices through ctypes, by algorithms that accumulate the columns without a split."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.libraries import require_cublas

# cublasLt.h, library_types.h
_FP16 = 2
_FP32 = 0
_E4M3 = 28
_SUMS_FP32 = 68
# attributes: of a description; of a preference
_TRANSPOSE_FIRST = 3
_WORKSPACE = 1
_REDUCTIONS = 3
# of a description of e4m3; a scale a row
_SCALES = (17, 18)
_FAST_SUMS = 25
_SCALE_MODES = (31, 32)
_VECTOR = 3
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
    """cuBLASLt on the current device, without a workspace: no algorithm that is taken needs one.

    fp8: weights and rows are e4m3 with a scale a row each, what comes out is fp16.
    """

    def __init__(self, fp8: bool = False) -> None:
        self._library = require_cublas()
        self._handle = ctypes.c_void_p()
        if status := self._library.cublasLtCreate(ctypes.byref(self._handle)):
            raise CheckError(
                f"expected the library cuBLASLt ({self._library._name}) to start, found {_said(status)}; free memory "
                "of the GPU, or name the folder of a cuBLAS for this driver in LD_LIBRARY_PATH"
            )
        cuda.destroy_with(self, self._library.cublasLtDestroy, self._handle)
        self._fp8 = fp8
        # of e4m3 any address will do until it is bound
        self._product = self._description(self._handle.value or 0, self._handle.value or 0)
        self._preference = self._made("cublasLtMatmulPreferenceCreate")
        self._set("cublasLtMatmulPreferenceSetAttribute", self._preference, _WORKSPACE, ctypes.c_size_t(0))
        self._set("cublasLtMatmulPreferenceSetAttribute", self._preference, _REDUCTIONS, ctypes.c_uint32(0))
        self._layouts: dict[tuple[int, int, bool], ctypes.c_void_p] = {}
        self._one = ctypes.c_float(1)
        self._zero = ctypes.c_float(0)

    def algorithms(self, out_features: int, in_features: int, rows: int) -> Iterator[Algorithm]:
        """Yield the algorithms without a split that cuBLAS has for a size, the one that it takes for fastest first."""
        found = (_Found * _MOST)()
        count = ctypes.c_int()
        weight = self._of(in_features, out_features, self._fp8)
        x = self._of(in_features, rows, self._fp8)
        out = self._of(out_features, rows)
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
        self, stream: cuda.Stream, weight: cuda.Array, x: cuda.Array, out: cuda.Array, *scales: cuda.Array
    ) -> Callable[[int, Algorithm], None]:
        """Return a call that multiplies the first rows of x with a weight, by an algorithm.

        The first rows of out [..., out_features] become x [..., in_features] times weight [out_features, in_features],
        transposed. scales: of e4m3, float32, the weight's [out_features] and those of rows. Raises CheckError where the
        algorithm does not run.
        """
        out_features, in_features = weight.shape
        one = ctypes.byref(self._one)
        zero = ctypes.byref(self._zero)
        a, b, c = (ctypes.c_void_p(array.address) for array in (weight, x, out))
        of_weight = self._of(in_features, out_features, self._fp8)
        of_x = self._of
        fp8 = self._fp8
        product = self._description(*(array.address for array in scales)) if fp8 else self._product
        matmul = self._library.cublasLtMatmul
        nothing = ctypes.c_size_t(0)
        queue = ctypes.c_void_p(stream.handle)

        def multiply(rows: int, algorithm: Algorithm, held: object = (weight, x, out, *scales)) -> None:
            """Multiply so many rows; `held` keeps the memory alive."""
            to = of_x(out_features, rows)
            status = matmul(
                self._handle, product, one, a, of_weight, b, of_x(in_features, rows, fp8), zero, c, to, c, to,
                algorithm, None, nothing, queue,
            )  # fmt: skip
            if status:
                raise CheckError(f"cuBLAS: cublasLtMatmul: {_said(status)}")

        return multiply

    def _description(self, of_weight: int, of_rows: int) -> ctypes.c_void_p:
        """Return a product's: out [out_features, rows] = weight, transposed, times x, by columns, as cuBLAS counts.

        of_weight, of_rows: addresses of scales of e4m3.
        """
        made = self._made("cublasLtMatmulDescCreate", ctypes.c_int(_SUMS_FP32), ctypes.c_int(_FP32))
        attributes: dict[int, ctypes._SimpleCData] = {_TRANSPOSE_FIRST: ctypes.c_int32(1)}
        if self._fp8:
            attributes |= {mode: ctypes.c_int32(_VECTOR) for mode in _SCALE_MODES}
            attributes |= dict(zip(_SCALES, map(ctypes.c_void_p, (of_weight, of_rows))))
            attributes[_FAST_SUMS] = ctypes.c_int8(0)
        for attribute, value in attributes.items():
            self._set("cublasLtMatmulDescSetAttribute", made, attribute, value)
        return made

    def _of(self, height: int, width: int, e4m3: bool = False) -> ctypes.c_void_p:
        """Return the description of fp16 or e4m3 [width, height], whose rows are columns to cuBLAS."""
        layout = self._layouts.get((height, width, e4m3))
        if layout is None:
            kind = ctypes.c_int(_E4M3 if e4m3 else _FP16)
            sizes = kind, ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height)
            layout = self._layouts[height, width, e4m3] = self._made("cublasLtMatrixLayoutCreate", *sizes)
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
