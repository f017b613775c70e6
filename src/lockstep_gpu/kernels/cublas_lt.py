"""cuBLASLt GEMM of fp16, bf16 or e4m3 matrices through ctypes, by algorithms without split-K."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lockstep.errors import CheckError
from lockstep_gpu import cuda
from lockstep_gpu.libraries import require_cublas

# Values of cublasLt.h and library_types.h, by their names there.
_R_32F = 0
_TYPES = {"float16": 2, "bfloat16": 14, "float8_e4m3fn": 28}
_COMPUTE_32F = 68
_DESC_TRANSA = 3
_DESC_SCALE_POINTERS = (17, 18)  # of A and of B, for e4m3
_DESC_FAST_ACCUM = 25
_DESC_SCALE_MODES = (31, 32)
_SCALE_OUTER_VEC_32F = 3  # a scale per row
_PREF_MAX_WORKSPACE_BYTES = 1
_PREF_REDUCTION_SCHEME_MASK = 3
_ALGO_SPLITK_NUM = 2
_STATUS = {1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
           13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR"}  # fmt: skip
_NOT_SUPPORTED = 15
_MAX_ALGORITHMS = 16  # of one query
Algorithm = bytes  # cublasLtMatmulAlgo_t, which is opaque


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_byte * 64),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """cuBLASLt on the current device, by algorithms that need no workspace.

    dtype: of weights, rows and outputs. e4m3 has a scale per output and per row, and outputs of `out_dtype`.
    """

    def __init__(self, dtype: np.dtype, out_dtype: np.dtype | None = None) -> None:
        self._library = require_cublas()
        self._handle = ctypes.c_void_p()
        status = self._library.cublasLtCreate(ctypes.byref(self._handle))
        if status:
            raise CheckError(
                f"expected the library cuBLASLt ({self._library._name}) to start, found {_name(status)}; free memory "
                "of the GPU, or name the folder of a cuBLAS for this driver in LD_LIBRARY_PATH"
            )
        cuda.destroy_with(self, self._library.cublasLtDestroy, self._handle)
        self._dtype = dtype.name
        self._type = _TYPES[dtype.name]
        self._fp8 = dtype.name == "float8_e4m3fn"
        self._out_type = _TYPES[(out_dtype or dtype).name]
        # Of e4m3 any addresses of scales will do to ask for algorithms.
        self._product = self._description(self._handle.value or 0, self._handle.value or 0)
        self._preference = self._create("cublasLtMatmulPreferenceCreate")
        self._set(
            "cublasLtMatmulPreferenceSetAttribute", self._preference, _PREF_MAX_WORKSPACE_BYTES, ctypes.c_size_t(0)
        )
        self._set(
            "cublasLtMatmulPreferenceSetAttribute", self._preference, _PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(0)
        )
        self._layouts: dict[tuple[int, int, int], ctypes.c_void_p] = {}
        self._one = ctypes.c_float(1)
        self._zero = ctypes.c_float(0)

    def algorithms(self, out_features: int, in_features: int, rows: int) -> Iterator[Algorithm]:
        """Yield the algorithms without split-K that cuBLAS has for a size, the fastest by its heuristic first."""
        results = (_HeuristicResult * _MAX_ALGORITHMS)()
        count = ctypes.c_int()
        weight = self._layout(in_features, out_features, self._type)
        x = self._layout(in_features, rows, self._type)
        out = self._layout(out_features, rows, self._out_type)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._product, weight, x, out, out, self._preference, _MAX_ALGORITHMS, results,
            ctypes.byref(count),
        )  # fmt: skip
        if status:
            return  # none for this size
        for result in results[: count.value]:
            split = ctypes.c_uint32()
            attribute = ctypes.byref(result.algorithm), _ALGO_SPLITK_NUM, ctypes.byref(split), ctypes.c_size_t(4), None
            self._check("cublasLtMatmulAlgoConfigGetAttribute", *attribute)
            if not result.state and not result.workspace and split.value <= 1:
                yield bytes(result.algorithm)

    def bind(
        self, stream: cuda.Stream, weight: cuda.Array, x: cuda.Array, out: cuda.Array, *scales: cuda.Array
    ) -> Callable[[int, Sequence[Algorithm]], None]:
        """Return a call that computes out = x @ weight.T for the first rows, by the first algorithm that runs.

        cuBLAS offers an algorithm for a number of rows; whether it runs for another one only a call tells.

        Args:
            weight: [out_features, in_features].
            x: [..., in_features].
            out: [..., out_features].
            scales: Of e4m3: float32, the weight's [out_features], and the rows'.

        The call raises CheckError if none of the algorithms runs.
        """
        out_features, in_features = weight.shape
        alpha = ctypes.byref(self._one)
        beta = ctypes.byref(self._zero)
        a, b, c = (ctypes.c_void_p(array.address) for array in (weight, x, out))
        weight_layout = self._layout(in_features, out_features, self._type)
        layout = self._layout
        product = self._product
        if self._fp8:
            product = self._description(*(array.address for array in scales))
        matmul = self._library.cublasLtMatmul
        no_workspace = ctypes.c_size_t(0)
        stream_handle = ctypes.c_void_p(stream.handle)

        def multiply(
            rows: int, algorithms: Sequence[Algorithm], arrays: Sequence[cuda.Array] = (weight, x, out, *scales)
        ) -> None:
            """Multiply `rows` rows; `arrays` keeps the memory alive."""
            out_layout = layout(out_features, rows, self._out_type)
            x_layout = layout(in_features, rows, self._type)
            status = _NOT_SUPPORTED
            for algorithm in algorithms:
                status = matmul(
                    self._handle, product, alpha, a, weight_layout, b, x_layout, beta, c, out_layout, c, out_layout,
                    algorithm, None, no_workspace, stream_handle,
                )  # fmt: skip
                if not status:
                    return
            alignment = "/".join(str(array.address & -array.address) for array in arrays[:3])
            raise CheckError(
                f"cuBLAS: cublasLtMatmul: expected one of {len(algorithms)} algorithms to run, found {_name(status)} "
                f"for {self._dtype}, m {out_features}, n {rows}, k {in_features}, leading dimensions "
                f"{in_features}/{in_features}/{out_features}, alignment {alignment} bytes; please report it"
            )

        return multiply

    def _description(self, weight_scales: int, row_scales: int) -> ctypes.c_void_p:
        """Return the description of a GEMM: out = weight.T @ x in cuBLAS's column-major order.

        weight_scales, row_scales: addresses of the scales of e4m3.
        """
        description = self._create("cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_R_32F))
        attributes: dict[int, ctypes._SimpleCData] = {_DESC_TRANSA: ctypes.c_int32(1)}
        if self._fp8:
            attributes |= {mode: ctypes.c_int32(_SCALE_OUTER_VEC_32F) for mode in _DESC_SCALE_MODES}
            attributes |= dict(zip(_DESC_SCALE_POINTERS, map(ctypes.c_void_p, (weight_scales, row_scales))))
            attributes[_DESC_FAST_ACCUM] = ctypes.c_int8(0)
        for attribute, value in attributes.items():
            self._set("cublasLtMatmulDescSetAttribute", description, attribute, value)
        return description

    def _layout(self, height: int, width: int, kind: int) -> ctypes.c_void_p:
        """Return the layout of an array [width, height], whose rows are cuBLAS's columns; kind: one of `_TYPES`."""
        layout = self._layouts.get((height, width, kind))
        if layout is None:
            sizes = ctypes.c_int(kind), ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height)
            layout = self._layouts[height, width, kind] = self._create("cublasLtMatrixLayoutCreate", *sizes)
        return layout

    def _create(self, name: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._check(name, ctypes.byref(handle), *arguments)
        return handle

    def _set(self, name: str, of: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        self._check(name, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CheckError(f"cuBLAS: {name}: {_name(status)}")


def _name(status: int) -> str:
    if status in _STATUS:
        return f"CUBLAS_STATUS_{_STATUS[status]}"
    return f"status {status}"
