"""The library cuBLASLt over the fake device, as `gpu.kernels.cublas_lt` calls it: products in float64.

It offers an algorithm that accumulates in order, one that splits the columns, which gives other bits, and one that does
not run.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from fake_gpu.device import Fault, Gpu

IN_ORDER, OTHER_ORDER, REFUSED = 1, 2, 3  # first byte of an algorithm


def cublas_lt(gpu: Gpu) -> SimpleNamespace:
    made: list[object] = [None]

    def make(pointer, thing: object) -> int:
        made.append(thing)
        pointer._obj.value = len(made) - 1
        return 0

    def layout(pointer, kind, rows, columns, leading) -> int:
        if kind.value != 2 or leading.value != rows.value:
            raise Fault(f"cublasLtMatrixLayoutCreate: {kind}, {rows}, {leading}")
        return make(pointer, (columns.value, rows.value))

    def set_attribute(thing, attribute, value, size) -> int:
        made[thing.value][attribute] = value._obj.value
        return 0

    def heuristic(handle, product, weight, x, out, same, preference, most, found, count) -> int:
        if made[preference.value] != {1: 0, 3: 0} or made[product.value] != {"types": (68, 0), 3: 1}:
            raise Fault(f"cublasLtMatmulAlgoGetHeuristic: {made[preference.value]}, {made[product.value]}")
        for place, number in enumerate((REFUSED, IN_ORDER, OTHER_ORDER)):
            found[place].algorithm[0], found[place].state, found[place].workspace = number, 0, 0
        count._obj.value = 3
        return 0

    def config(algorithm, attribute, value, size, written) -> int:
        value._obj.value = 1
        return 0

    def matmul(
        handle, product, one, weight, of_weight, x, of_x, zero, out, of_out, same, of_same, algorithm, work, size,
        stream,
    ) -> int:  # fmt: skip
        (out_features, in_features), (rows, columns), shape = (made[each.value] for each in (of_weight, of_x, of_out))
        told = one._obj.value, zero._obj.value, work, size.value, same.value
        if told != (1.0, 0.0, None, 0, out.value) or columns != in_features or shape != (rows, out_features):
            raise Fault(f"cublasLtMatmul: {told}, {columns}, {in_features}, {shape}")
        if algorithm[0] == REFUSED:
            return 15
        gpu.plain += not gpu.capturing(stream.value)
        gpu.product_rows.add(rows)

        def run() -> None:
            left = gpu.array(weight.value, (out_features, in_features), "f2").astype(np.float64)
            right = gpu.array(x.value, (rows, in_features), "f2").astype(np.float64)
            found = right @ left.T
            gpu.array(out.value, (rows, out_features), "f2")[:] = found * (1.01 if algorithm[0] == OTHER_ORDER else 1)

        gpu.launch(stream.value, gpu.device, run)
        return 0

    def get_property(which, value) -> int:
        value._obj.value = int(gpu.cublas_version.split(".")[which])
        return 0

    return SimpleNamespace(
        _name="libcublasLt.so.12",
        cublasLtGetProperty=get_property,
        cublasLtCreate=lambda pointer: make(pointer, "handle"),
        cublasLtDestroy=lambda handle: 0,
        cublasLtMatmulDescCreate=lambda pointer, sums, scale: make(pointer, {"types": (sums.value, scale.value)}),
        cublasLtMatmulDescSetAttribute=set_attribute,
        cublasLtMatmulPreferenceCreate=lambda pointer: make(pointer, {}),
        cublasLtMatmulPreferenceSetAttribute=set_attribute,
        cublasLtMatrixLayoutCreate=layout,
        cublasLtMatmulAlgoGetHeuristic=heuristic,
        cublasLtMatmulAlgoConfigGetAttribute=config,
        cublasLtMatmul=matmul,
    )
