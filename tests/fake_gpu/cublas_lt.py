"""The library cuBLASLt over the fake device, as `gpu.kernels.cublas_lt` calls it: products in float64.

It offers an algorithm that accumulates in order, one that does so for some numbers of rows alone, one that splits the
columns, which gives other bits, one that does so in the rows after many others, and one that does not run. None runs
for a single output, as of a gate.
"""

from __future__ import annotations

from types import SimpleNamespace

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


def cublas_lt(gpu: Gpu) -> SimpleNamespace:
    results: list[object] = [None]

    def make(pointer, thing: object) -> int:
        results.append(thing)
        pointer._obj.value = len(results) - 1
        return 0

    def layout(pointer, kind, rows, columns, leading) -> int:
        if kind.value not in TYPES or leading.value != rows.value or (kind.value == E4M3 and rows.value % 16):
            raise Fault(f"cublasLtMatrixLayoutCreate: {kind}, {rows}, {leading}")
        return make(pointer, (columns.value, rows.value, kind.value))

    def set_attribute(thing, attribute, value, size) -> int:
        results[thing.value][attribute] = value._obj.value
        return 0

    def heuristic(handle, product, weight, x, out, same, preference, max_count, algorithms, count) -> int:
        if results[preference.value] != {1: 0, 3: 0}:
            raise Fault(f"cublasLtMatmulAlgoGetHeuristic: {results[preference.value]}")
        described(product, results[weight.value], results[x.value], results[out.value])
        for place, number in enumerate((REFUSED, STREAMED, SOME_ROWS, IN_ORDER, OTHER_ORDER)):
            algorithms[place].algorithm[0] = number
            algorithms[place].state = 0
            algorithms[place].workspace = 0
        count._obj.value = 5
        return 0

    def described(product, weight, x, out) -> bool:
        """Whether a product is of e4m3 numbers."""
        settings = {key: value for key, value in results[product.value].items() if key not in (17, 18)}
        fp8 = settings == FP8
        kinds = weight[2], x[2], out[2]
        if settings != (FP8 if fp8 else FP16) or kinds not in (
            [(E4M3, E4M3, HALF), (E4M3, E4M3, BFLOAT16)] if fp8 else [(HALF,) * 3, (BFLOAT16,) * 3]
        ):
            raise Fault(f"cuBLAS: {results[product.value]} of {kinds}")
        return fp8

    def config(algorithm, attribute, value, size, written) -> int:
        value._obj.value = 1
        return 0

    def matmul(
        handle, product, alpha, weight, of_weight, x, of_x, zero, out, of_out, same, of_same, algorithm, work, size,
        stream,
    ) -> int:  # fmt: skip
        fp8 = described(product, *(results[item.value] for item in (of_weight, of_x, of_out)))
        sizes = (results[item.value][:2] for item in (of_weight, of_x, of_out))
        (out_features, in_features), (rows, columns), shape = sizes
        if fp8 and (out_features % 16 or weight.value % 16 or x.value % 16):
            raise Fault(f"cublasLtMatmul: {out_features} outputs, {weight.value}, {x.value}")
        call = alpha._obj.value, zero._obj.value, work, size.value, same.value
        if call != (1.0, 0.0, None, 0, out.value) or columns != in_features or shape != (rows, out_features):
            raise Fault(f"cublasLtMatmul: {call}, {columns}, {in_features}, {shape}")
        if algorithm[0] == REFUSED or (algorithm[0] == SOME_ROWS and rows % 16) or out_features == 1:
            return 15
        gpu.plain += not gpu.capturing(stream.value)
        gpu.product_rows.add(rows)

        def run() -> None:
            factor, out_kind = (TYPES[results[item.value][2]] for item in (of_weight, of_out))
            weights = gpu.array(weight.value, (out_features, in_features), factor).astype(np.float64)
            right = gpu.array(x.value, (rows, in_features), factor).astype(np.float64)
            sums = right @ weights.T
            if fp8:
                weight_scales, row_scales = (results[product.value][key] for key in (17, 18))
                sums *= gpu.array(weight_scales, (out_features,), "f4") * gpu.array(row_scales, (rows, 1), "f4")
            if algorithm[0] == OTHER_ORDER and not fp8:
                sums *= 1.01
            if algorithm[0] == STREAMED and not fp8:
                sums[1024:] *= 1.01
            gpu.array(out.value, (rows, out_features), out_kind)[:] = sums

        gpu.launch(stream.value, gpu.device, run)
        return 0

    def get_property(which, value) -> int:
        value._obj.value = int(gpu.cublas_version.split(".")[which])
        return 0

    return SimpleNamespace(
        _name="libcublasLt.so.12", cublasLtGetProperty=get_property,
        cublasLtCreate=lambda pointer: make(pointer, "handle"), cublasLtDestroy=lambda handle: 0,
        cublasLtMatmulDescCreate=lambda pointer, sums, scale: make(pointer, {"types": (sums.value, scale.value)}),
        cublasLtMatmulDescSetAttribute=set_attribute, cublasLtMatmulPreferenceCreate=lambda pointer: make(pointer, {}),
        cublasLtMatmulPreferenceSetAttribute=set_attribute, cublasLtMatrixLayoutCreate=layout,
        cublasLtMatmulAlgoGetHeuristic=heuristic, cublasLtMatmulAlgoConfigGetAttribute=config, cublasLtMatmul=matmul,
    )  # fmt: skip
