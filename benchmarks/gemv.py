"""Would a weight-only kernel of our own pay for decoding on a GPU? Projections of a 7B model with fp16, int8 and int4
weights, one to eight rows, by one kernel (gemv.cu), beside what the device's memory gives.

Needs NumPy, cuda-python and NVRTC, and no TensorRT: `python -m benchmarks.gemv OUT.json`, in the Python that the
backend `tensorrt` runs in. Each number is a median over launches of a CUDA graph whose nodes read other copies of the
weight, 256 MB and more in all, so that none is in the L2 cache. Outputs are held against NumPy first.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import CheckError
from lockstep.backends.tensorrt import cuda

SOURCE = Path(__file__).with_name("gemv.cu").read_text(encoding="utf-8")
# out_features, in_features of a layer of Llama 2 7B, products of one input as one.
SHAPES = {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
FORMS = ((16, None), (8, 128), (8, 32), (4, 128), (4, 32))  # bits, group size
ROWS = (1, 2, 4, 8)
VARIANTS = tuple((tiles, warps) for tiles in (1, 2) for warps in (4, 8, 16))
BLOCK_US = 148  # of a whole block at one row in fp16 by TensorRT 8.6 on an H200, attention left out
_BYTES = 256 << 20  # read between two reads of the same bytes: five times the L2 cache of an H200
_LAUNCHES, _WARM, _CHECKED = 7, 1, 128
# fp32 sums of fp16 products of 1e4 numbers, the result in fp16: relative to the largest output. Weights are rounded to
# fp16 after their scale is applied.
_TOLERANCE = 4e-3


@dataclass(frozen=True)
class Weight:
    """copies: [number, bytes] on the device, all the same. numbers: float32 of the first rows."""

    copies: cuda.Array
    scales: cuda.Array
    numbers: np.ndarray
    nbytes: int  # of one, scales too


def measure(out: str, seconds: float = 50) -> None:
    """Write the record to `out`; forms and shapes for which the time does not reach are left out of it, by name.

    Raises CheckError for outputs that are off NumPy's.
    """
    began, module, stream = time.perf_counter(), cuda.compile_kernels(SOURCE), cuda.Stream()
    gpu = _name()
    record: dict[str, Any] = {"benchmark": "gemv", "gpu": gpu, "compile_s": round(time.perf_counter() - began, 2)}
    record |= {"memory": _memory(module, stream), "products": [], "left_out": []}
    for name, (rows_out, columns) in SHAPES.items():
        for bits, group in FORMS:
            if time.perf_counter() - began > seconds:
                record["left_out"].append([name, bits, group])
                continue
            weight = _weight(stream, rows_out, columns, bits, group)
            for rows in ROWS:
                found = _product(module, stream, weight, (rows_out, columns, bits, group, rows))
                record["products"].append({"shape": name, **found})
    record |= {"blocks": list(_blocks(record["products"])), "fp16_block_us": BLOCK_US}
    record["seconds"] = round(time.perf_counter() - began, 1)
    Path(out).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _product(
    module: Any, stream: cuda.Stream, weight: Weight, what: tuple[int, int, int, int | None, int]
) -> dict[str, Any]:
    """The fastest variant of the kernel, once all are right."""
    rows_out, columns, bits, group, rows = what
    random = np.random.default_rng(rows)
    host = random.standard_normal((rows, columns)).astype(np.float16)
    x, y = cuda.empty((rows, columns), "f2"), cuda.empty((rows, rows_out), "f2")
    stream.upload(x, host)
    expected = host.astype(np.float64) @ weight.numbers.astype(np.float64).T
    times, worst = {}, 0.0
    for tiles, warps in VARIANTS:
        kernel, blocks = module[f"gemv_{bits}_{tiles}_{warps}"], rows_out // (16 * tiles)

        def launch(copy: cuda.Array) -> None:
            arguments = (copy, weight.scales, x, y, rows_out, columns, group or columns, rows)
            kernel.launch(stream, blocks, warps * 32, *arguments)  # noqa: B023

        found = np.empty((rows, rows_out), np.float16)
        launch(weight.copies[0:1])
        stream.download(found, y)
        stream.synchronize()
        error = float(np.abs(found[:, : len(weight.numbers)] - expected).max() / np.abs(expected).max())
        if not error < _TOLERANCE:
            raise CheckError(
                f"gemv: expected outputs of {rows} rows within {_TOLERANCE} of NumPy's, found {error:.3g} with {bits} "
                f"bits, groups of {group}, {tiles} tiles, {warps} warps"
            )
        worst = max(worst, error)
        count = weight.copies.shape[0]
        times[tiles, warps] = _time(stream, lambda: [launch(weight.copies[i : i + 1]) for i in range(count)], count)
    best = min(times, key=lambda variant: times[variant])
    return {
        "rows": rows, "bits": bits, "group_size": group, "us": round(times[best], 2), "tiles": best[0],
        "warps": best[1], "gb_s": round(weight.nbytes / times[best] / 1e3, 1), "mbytes": round(weight.nbytes / 1e6, 2),
        "error": float(f"{worst:.2g}"),
    }  # fmt: skip


def _time(stream: cuda.Stream, work: Any, count: int) -> float:
    """Microseconds of one of `count` pieces of work, the median over launches of all as one graph."""
    with stream.capture() as graph:
        work()
    found = []
    for number in range(_WARM + _LAUNCHES):
        before, after = cuda.Event(), cuda.Event()
        before.record(stream)
        graph.launch(stream)
        after.record(stream)
        after.wait()
        if number >= _WARM:
            found.append(after.milliseconds_since(before) * 1e3 / count)
    return statistics.median(found)


def _weight(stream: cuda.Stream, rows: int, columns: int, bits: int, group: int | None) -> Weight:
    """Random numbers, in the layout of MatMulNBits: each copy on the device is the same."""
    random = np.random.default_rng(0)
    data = np.frombuffer(random.bytes(rows * columns), np.uint8).reshape(rows, columns)
    groups, scales = columns // (group or columns), np.ones((rows, 1), np.float16)
    first = data[:_CHECKED].astype(np.float32) - 128
    if bits == 16:
        stored = (data.astype(np.float16) - np.float16(128)) * np.float16(2**-7)
        numbers = first * np.float32(2**-7)
    else:
        scales = (random.uniform(0.5, 1.5, (rows, groups)) / (1 << bits - 1)).astype(np.float16)
        stored = data
        if bits == 4:
            stored, first = data[:, : columns // 2], None
            pairs = stored[:_CHECKED]
            first = np.stack([pairs & 15, pairs >> 4], -1).reshape(-1, columns).astype(np.float32) - 8
        of_groups = first.reshape(len(first), groups, -1) * scales[:_CHECKED, :, None].astype(np.float32)
        numbers = of_groups.reshape(len(first), columns)
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
    count = max(2, -(-_BYTES // raw.size))
    copies, small = cuda.empty((count, raw.size), "u1", "copies of a weight"), cuda.empty(scales.shape, "f2")
    stream.upload(copies[0:1], raw)
    for number in range(1, count):
        stream.copy_rows(copies[number : number + 1].address, raw.size, copies.address, raw.size, raw.size, 1)
    stream.upload(small, scales)
    stream.synchronize()
    return Weight(copies, small, numbers, raw.size + (0 if bits == 16 else scales.nbytes))


def _memory(module: Any, stream: cuda.Stream) -> dict[str, float]:
    """What the device's memory gives, GB/s: a copy by the driver, bytes read and written; a kernel that reads."""
    size, units, threads = 512 << 20, 16, 256
    one, other, seen = cuda.zeros((size,), "u1"), cuda.empty((size,), "u1"), cuda.zeros((1,), "u4")
    copy = _time(stream, lambda: stream.copy_rows(other.address, size, one.address, size, size, 1), 1)
    blocks = size // 16 // units // threads
    read = _time(stream, lambda: module["read_all"].launch(stream, blocks, threads, one, seen, units), 1)
    return {"copy_gb_s": round(2 * size / copy / 1e3, 1), "read_gb_s": round(size / read / 1e3, 1)}


def _blocks(products: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The four projections of a layer together, and how many times as fast as in fp16."""
    sums: dict[tuple[int, int | None, int], list[float]] = {}
    for each in products:
        sums.setdefault((each["bits"], each["group_size"], each["rows"]), []).append(each["us"])
    whole = {key: sum(values) for key, values in sums.items() if len(values) == len(SHAPES)}
    for (bits, group, rows), us in whole.items():
        fp16 = whole.get((16, None, rows))
        ratio = {"times_as_fast_as_fp16": round(fp16 / us, 3)} if fp16 else {}
        yield {"bits": bits, "group_size": group, "rows": rows, "us": round(us, 2), **ratio}


def _name() -> str:
    properties = cuda.check(cuda.runtime.cudaGetDeviceProperties(cuda.current_device()))
    return str(properties.name.decode().strip("\0"))


if __name__ == "__main__":
    measure(sys.argv[1], *map(float, sys.argv[2:]))
