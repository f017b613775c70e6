"""The library cuBLAS over the fake device, as `backends.tensorrt.cublas` calls it: products in float32."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from fake_gpu.device import Fault, Gpu


def cublas(gpu: Gpu) -> SimpleNamespace:
    streams: dict[int, int] = {}

    def create(handle) -> int:
        handle._obj.value = 1 + len(streams)
        streams[handle._obj.value] = 0
        return 0

    def set_stream(handle, stream) -> int:
        streams[handle.value] = stream.value
        return 0

    def gemm_ex(
        handle, first, second, out_features, rows, in_features, one, weight, kind_a, wide_a, x, kind_b, wide_b, zero,
        out, kind_c, wide_c, sums, way,
    ) -> int:  # fmt: skip
        told = (first, second, one._obj.value, zero._obj.value, kind_a, kind_b, kind_c, sums, way)
        if told != (1, 0, 1.0, 0.0, 2, 2, 2, 68, -1) or (wide_a, wide_b, wide_c) != (
            in_features, in_features, out_features,
        ):  # fmt: skip
            raise Fault(f"cublasGemmEx: {told}, {wide_a}, {wide_b}, {wide_c}")
        stream = streams[handle.value]
        gpu.plain += not gpu.capturing(stream)
        gpu.product_rows.add(rows)

        def run() -> None:
            left = gpu.array(weight.value, (out_features, in_features), "f2").astype(np.float32)
            right = gpu.array(x.value, (rows, in_features), "f2").astype(np.float32)
            gpu.array(out.value, (rows, out_features), "f2")[:] = right @ left.T

        gpu.launch(stream, gpu.device, run)
        return 0

    def get_property(which, value) -> int:
        value._obj.value = int(gpu.cublas_version.split(".")[which])
        return 0

    return SimpleNamespace(
        cublasGetProperty=get_property,
        cublasCreate_v2=create,
        cublasSetStream_v2=set_stream,
        cublasSetWorkspace_v2=lambda handle, address, size: 0,
        cublasGemmEx=gemm_ex,
        cublasDestroy_v2=lambda handle: 0,
    )
