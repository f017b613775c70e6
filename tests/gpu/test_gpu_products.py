"""Products of e4m3 numbers on a GPU: by the kernel for up to 16 rows, by that of tiles, by cuBLAS."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from test_gpu_kernels import OnDevice

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ROWS = 300


# A tile is multiplied by a cluster of four blocks, of two, and by one that takes several; part of a stage, few stages.
@pytest.mark.parametrize(
    ("sizes", "in_features"),
    [
        ((256, 64, 48), 208),
        ((128, 16, 16, 48), 4096),
        pytest.param((6144,), 1024, marks=pytest.mark.long),
        ((16, 17008), 144),
    ],
)
def test_products_of_e4m3_for_any_number_of_rows(sizes, in_features):
    from lockstep_gpu.kernels.fp8_gemm import Fp8Gemm, QuantizedRows

    device = OnDevice()
    random = np.random.default_rng(0)
    weight, x = (random.standard_normal((rows, in_features), "f4").astype(E4M3) for rows in (sum(sizes), ROWS))
    scales, steps = (random.uniform(0.01, 0.1, rows).astype(np.float32) for rows in (len(weight), ROWS))
    outs = [device.up(np.zeros((ROWS, size), np.float16)) for size in sizes]
    quantized = QuantizedRows(device.up(x.view(np.uint8)), device.up(steps))
    multiply = Fp8Gemm(device.stream, np.dtype(np.float16)).bind(
        device.up(weight.view(np.uint8)), device.up(scales), device.up(np.zeros((ROWS, in_features), "f2")), outs,
        quantized,
    )  # fmt: skip
    scale = np.outer(steps, scales)
    expected = (x.astype(np.float64) @ weight.astype(np.float64).T) * scale
    magnitudes = np.abs(x.astype(np.float32)) @ np.abs(weight.astype(np.float32)).T * scale
    # Results are rounded to fp16, and tensor cores keep 13 bits after the largest of their terms.
    allowed = 2.0**-11 * np.abs(expected) + 2.0**-12 * magnitudes
    for rows in (1, 9, 17, 33, 64, 65, 100, 128, 129, ROWS):
        for out in outs:
            device.stream.upload(out, np.full(out.shape, 7, np.float16))
            device.stream.synchronize()
        multiply(rows)
        actual = np.concatenate([device.down(out) for out in outs], axis=1)
        error = np.abs(actual[:rows].astype(np.float64) - expected[:rows])
        assert (error <= allowed[:rows]).all(), f"{rows} rows: {np.nanmax(error / allowed[:rows])} times the limit"
        assert (actual[rows:] == 7).all()
