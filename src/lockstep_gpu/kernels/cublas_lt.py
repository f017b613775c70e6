"""cuBLASLt GEMM of fp16, bf16 or e4m3 matrices through nvmath's bindings, by algorithms without split-K."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.errors import CheckError
from lockstep_gpu import cuda
from lockstep_gpu.libraries import require_cublas

# Values of cublasLt.h and library_types.h, by their names there.
_R_32F = 0
_TYPES = {"float16": 2, "bfloat16": 14, "float8_e4m3fn": 28}
_COMPUTE_32F = 68
_MAX_ALGORITHMS = 16  # of one query
Algorithm = int  # address of a cublasLtMatmulAlgo_t, which is opaque; of a `CublasLt`, equal ones have one address


class CublasLt:
    """cuBLASLt on the current device, by algorithms that need no workspace.

    dtype: of weights, rows and outputs. e4m3 has a scale per output and per row, and outputs of `out_dtype`.
    """

    def __init__(self, dtype: np.dtype, out_dtype: np.dtype | None = None) -> None:
        self._api = require_cublas()
        try:
            self._handle = self._api.create()
        except self._api.cuBLASLtError as error:
            raise CheckError(
                f"expected the library cuBLASLt {self._api.get_version()} to start, found {self._name(error)}; free "
                "memory of the GPU, or name the folder of a cuBLAS for this driver in LD_LIBRARY_PATH"
            ) from None
        cuda.destroy_with(self, self._api.destroy, self._handle)
        self._dtype = dtype.name
        self._type = _TYPES[dtype.name]
        self._fp8 = dtype.name == "float8_e4m3fn"
        self._out_type = _TYPES[(out_dtype or dtype).name]
        try:
            # Of e4m3 any addresses of scales will do to ask for algorithms.
            self._product = self._description(self._handle, self._handle)
            self._preference = self._no_workspace()
        except self._api.cuBLASLtError as error:  # cuBLAS before 12.9 has no scale per row
            raise CheckError(
                f"expected GEMMs of {dtype.name} with float32 sums in cuBLASLt {self._api.get_version()}, found "
                f"{self._name(error)}; install a newer cuBLAS"
            ) from None
        self._layouts: dict[tuple[int, int, int], int] = {}
        self._algorithms: dict[bytes, np.ndarray] = {}
        self._one = np.ones(1, np.float32)
        self._zero = np.zeros(1, np.float32)

    def algorithms(self, out_features: int, in_features: int, rows: int) -> Iterator[Algorithm]:
        """Yield the algorithms without split-K that cuBLAS has for a size, the fastest by its heuristic first."""
        results = np.zeros(_MAX_ALGORITHMS, self._api.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        weight = self._layout(in_features, out_features, self._type)
        x = self._layout(in_features, rows, self._type)
        out = self._layout(out_features, rows, self._out_type)
        try:
            self._api.matmul_algo_get_heuristic(
                self._handle, self._product, weight, x, out, out, self._preference, _MAX_ALGORITHMS,
                results.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        except self._api.cuBLASLtError:
            return  # none for this size
        split = np.zeros(1, np.uint32)
        attribute = self._api.MatmulAlgoConfigAttribute.SPLITK_NUM
        for result in results[: count[0]]:
            content = result["algo"].tobytes()
            algorithm = self._algorithms.setdefault(content, np.frombuffer(content, np.uint8)).ctypes.data
            self._api.matmul_algo_config_get_attribute(algorithm, attribute, split.ctypes.data, split.nbytes, 0)
            if not result["state"] and not result["workspace_size"] and split[0] <= 1:
                yield algorithm

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
        alpha = self._one.ctypes.data
        beta = self._zero.ctypes.data
        a, b, c = (array.address for array in (weight, x, out))
        weight_layout = self._layout(in_features, out_features, self._type)
        layout = self._layout
        product = self._product
        if self._fp8:
            product = self._description(*(array.address for array in scales))
        matmul = self._api.matmul
        refused = self._api.cuBLASLtError
        handle = self._handle
        stream_handle = stream.handle

        def multiply(
            rows: int, algorithms: Sequence[Algorithm], arrays: Sequence[cuda.Array] = (weight, x, out, *scales)
        ) -> None:
            """Multiply `rows` rows; `arrays` keeps the memory alive."""
            out_layout = layout(out_features, rows, self._out_type)
            x_layout = layout(in_features, rows, self._type)
            status = "no status"
            for algorithm in algorithms:
                try:
                    matmul(
                        handle, product, alpha, a, weight_layout, b, x_layout, beta, c, out_layout, c, out_layout,
                        algorithm, 0, 0, stream_handle,
                    )  # fmt: skip
                    return
                except refused as error:
                    status = self._name(error)
            alignment = "/".join(str(array.address & -array.address) for array in arrays[:3])
            raise CheckError(
                f"cuBLAS: cublasLtMatmul: expected one of {len(algorithms)} algorithms to run, found {status} "
                f"for {self._dtype}, m {out_features}, n {rows}, k {in_features}, leading dimensions "
                f"{in_features}/{in_features}/{out_features}, alignment {alignment} bytes; please report it"
            )

        return multiply

    def _description(self, weight_scales: int, row_scales: int) -> int:
        """Return the description of a GEMM: out = weight.T @ x in cuBLAS's column-major order.

        weight_scales, row_scales: addresses of the scales of e4m3.
        """
        api = self._api
        of = api.MatmulDescAttribute
        attributes = {of.TRANSA: 1}
        if self._fp8:
            by_row = api.MatmulMatrixScale.OUTER_VEC_32F
            attributes |= {of.A_SCALE_MODE: by_row, of.B_SCALE_MODE: by_row, of.FAST_ACCUM: 0}
            attributes |= {of.A_SCALE_POINTER: weight_scales, of.B_SCALE_POINTER: row_scales}
        description = api.matmul_desc_create(_COMPUTE_32F, _R_32F)
        for attribute, value in attributes.items():
            buffer = np.array([value], api.get_matmul_desc_attribute_dtype(attribute))
            api.matmul_desc_set_attribute(description, attribute, buffer.ctypes.data, buffer.nbytes)
        return int(description)

    def _no_workspace(self) -> int:
        api = self._api
        preference = api.matmul_preference_create()
        of = api.MatmulPreferenceAttribute
        for attribute in (of.MAX_WORKSPACE_BYTES, of.REDUCTION_SCHEME_MASK):
            none = np.zeros(1, api.get_matmul_preference_attribute_dtype(attribute))
            api.matmul_preference_set_attribute(preference, attribute, none.ctypes.data, none.nbytes)
        return int(preference)

    def _layout(self, height: int, width: int, kind: int) -> int:
        """Return the layout of an array [width, height], whose rows are cuBLAS's columns; kind: one of `_TYPES`."""
        layout = self._layouts.get((height, width, kind))
        if layout is None:
            layout = self._layouts[height, width, kind] = self._api.matrix_layout_create(kind, height, width, height)
        return layout

    def _name(self, error: Any) -> str:  # a cuBLASLtError, which has no types
        return str(self._api.get_status_name(error.status))
