"""`nvmath.bindings.cublasLt` over the fake device, as `gpu.kernels.cublas_lt` calls it: products in float64.

It offers an algorithm that accumulates in order, one that does so for some numbers of rows alone, one that splits the
columns, which gives other bits, one that does so in the rows after many others, and one that does not run. None runs
for a single output, as of a gate.
"""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from fake_gpu.device import Fault, Gpu

# first byte of an algorithm
IN_ORDER = 1
OTHER_ORDER = 2
REFUSED = 3
SOME_ROWS = 4
STREAMED = 5
# types of elements
HALF = 2
BFLOAT16 = 14
E4M3 = 28
TYPES = {HALF: np.dtype("f2"), BFLOAT16: np.dtype(ml_dtypes.bfloat16), E4M3: np.dtype(ml_dtypes.float8_e4m3fn)}
# The description of products of 16 bits, and of e4m3 but for addresses of scales.
FP16 = {"types": (68, 0), 3: 1}
FP8 = FP16 | {31: 3, 32: 3, 25: 0}


ALGORITHM = np.dtype([("data_", "<u8", (8,))])
HEURISTIC_RESULT = np.dtype(
    [("algo", ALGORITHM), ("workspace_size", "<u8"), ("state", "<i4"), ("waves_count", "<f4"), ("reserved", "<i4", 4)]
)
DTYPES = {3: "i4", 17: "i8", 18: "i8", 25: "i1", 31: "i4", 32: "i4"}  # of attributes of a description
PREFERENCES = {1: "u8", 3: "u4"}
STATUSES = {1: "CUBLAS_STATUS_NOT_INITIALIZED", 7: "CUBLAS_STATUS_INVALID_VALUE", 15: "CUBLAS_STATUS_NOT_SUPPORTED"}


class cuBLASLtError(Exception):  # by its name there
    def __init__(self, status: int):
        super().__init__(f"{status}. You can set CUBLASLT_LOG_LEVEL=5")
        self.status = status


def at(address: int, dtype: object, count: int = 1) -> np.ndarray:
    """The memory of the host at an address."""
    buffer = (ctypes.c_byte * (np.dtype(dtype).itemsize * count)).from_address(address)
    return np.frombuffer(buffer, dtype)


def cublas_lt(gpu: Gpu) -> ModuleType:
    results: list[object] = [None]

    def make(thing: object) -> int:
        results.append(thing)
        return len(results) - 1

    def layout(kind: int, rows: int, columns: int, leading: int) -> int:
        if kind not in TYPES or leading != rows or (kind == E4M3 and rows % 16):
            raise Fault(f"cublasLtMatrixLayoutCreate: {kind}, {rows}, {leading}")
        return make((columns, rows, kind))

    def set_attribute(thing: int, attribute: int, value: int, size: int) -> None:
        (results[thing][attribute],) = at(value, (DTYPES if "types" in results[thing] else PREFERENCES)[attribute])

    def heuristic(handle, product, weight, x, out, same, preference, max_count, algorithms, count) -> None:
        if results[preference] != {1: 0, 3: 0}:
            raise Fault(f"cublasLtMatmulAlgoGetHeuristic: {results[preference]}")
        described(product, results[weight], results[x], results[out])
        offered = (REFUSED, STREAMED, SOME_ROWS, IN_ORDER, OTHER_ORDER)
        for place, number in zip(at(algorithms, HEURISTIC_RESULT, max_count), offered):
            place["algo"]["data_"][0] = number
        at(count, "i4")[0] = len(offered)

    def described(product, weight, x, out) -> bool:
        """Whether a product is of e4m3 numbers."""
        settings = {key: value for key, value in results[product].items() if key not in (17, 18)}
        fp8 = settings == FP8
        kinds = weight[2], x[2], out[2]
        if settings != (FP8 if fp8 else FP16) or kinds not in (
            [(E4M3, E4M3, HALF), (E4M3, E4M3, BFLOAT16)] if fp8 else [(HALF,) * 3, (BFLOAT16,) * 3]
        ):
            raise Fault(f"cuBLAS: {results[product]} of {kinds}")
        return fp8

    def config(algorithm, attribute, value, size, written) -> None:
        at(value, "u4")[0] = 1

    def matmul(
        handle, product, alpha, weight, of_weight, x, of_x, zero, out, of_out, same, of_same, algorithm, work, size,
        stream,
    ) -> None:  # fmt: skip
        fp8 = described(product, *(results[item] for item in (of_weight, of_x, of_out)))
        sizes = (results[item][:2] for item in (of_weight, of_x, of_out))
        (out_features, in_features), (rows, columns), shape = sizes
        if fp8 and (out_features % 16 or weight % 16 or x % 16):
            raise Fault(f"cublasLtMatmul: {out_features} outputs, {weight}, {x}")
        call = at(alpha, "f4")[0], at(zero, "f4")[0], work, size, same
        if call != (1.0, 0.0, 0, 0, out) or columns != in_features or shape != (rows, out_features):
            raise Fault(f"cublasLtMatmul: {call}, {columns}, {in_features}, {shape}")
        order = at(algorithm, "u8")[0]
        if order == REFUSED or (order == SOME_ROWS and rows % 16) or out_features == 1:
            raise cuBLASLtError(15)
        gpu.plain += not gpu.capturing(stream)
        gpu.product_rows.add(rows)

        def run() -> None:
            factor, out_kind = (TYPES[results[item][2]] for item in (of_weight, of_out))
            weights = gpu.array(weight, (out_features, in_features), factor).astype(np.float64)
            right = gpu.array(x, (rows, in_features), factor).astype(np.float64)
            sums = right @ weights.T
            if fp8:
                weight_scales, row_scales = (int(results[product][key]) for key in (17, 18))
                sums *= gpu.array(weight_scales, (out_features,), "f4") * gpu.array(row_scales, (rows, 1), "f4")
            if order == OTHER_ORDER and not fp8:
                sums *= 1.01
            if order == STREAMED and not fp8:
                sums[1024:] *= 1.01
            gpu.array(out, (rows, out_features), out_kind)[:] = sums

        gpu.launch(stream, gpu.device, run)

    major, minor, patch = map(int, gpu.cublas_version.split("."))
    module = ModuleType("nvmath.bindings.cublasLt")
    vars(module).update(
        cuBLASLtError=cuBLASLtError, matmul_heuristic_result_dtype=HEURISTIC_RESULT,
        MatmulDescAttribute=SimpleNamespace(
            TRANSA=3, A_SCALE_POINTER=17, B_SCALE_POINTER=18, FAST_ACCUM=25, A_SCALE_MODE=31, B_SCALE_MODE=32
        ),
        MatmulMatrixScale=SimpleNamespace(OUTER_VEC_32F=3),
        MatmulPreferenceAttribute=SimpleNamespace(MAX_WORKSPACE_BYTES=1, REDUCTION_SCHEME_MASK=3),
        MatmulAlgoConfigAttribute=SimpleNamespace(SPLITK_NUM=2),
        create=lambda: make("handle"), destroy=lambda handle: None,
        get_property=lambda which: (major, minor, patch)[which],
        get_version=lambda: 10000 * major + 100 * minor + patch,
        get_status_name=STATUSES.get,
        matmul_desc_create=lambda sums, scale: make({"types": (sums, scale)}),
        matmul_desc_set_attribute=set_attribute, get_matmul_desc_attribute_dtype=DTYPES.get,
        matmul_preference_create=lambda: make({}), get_matmul_preference_attribute_dtype=PREFERENCES.get,
        matmul_preference_set_attribute=set_attribute, matrix_layout_create=layout,
        matmul_algo_get_heuristic=heuristic, matmul_algo_config_get_attribute=config, matmul=matmul,
    )  # fmt: skip
    return module
