"""Would kernels of our own pay for adapters on a GPU? A layer's shrink and expand (sgmv.cu), segmented by adapter,
beside what the form in the graph adds to a step.

An engine of TensorRT 8.6 takes no such kernel inside, so these run alone, behind one another in a CUDA graph, as if the
block was cut at each group of projections. Needs NumPy, cuda-python and NVRTC: `python -m benchmarks.sgmv OUT.json`, in
the Python that the backend `tensorrt` runs in. Outputs are held against NumPy first.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import CheckError

if TYPE_CHECKING:
    from lockstep.backends.tensorrt import cuda  # needs cuda-python, where it is used

SOURCE = Path(__file__).with_name("sgmv.cu").read_text(encoding="utf-8")
# Layers of a decoder layer of Llama 2 7B that read the same values: in_features, out_features of each.
GROUPS = {"qkv": (4096, (4096,) * 3), "o": (4096, (4096,)), "gate_up": (4096, (11008,) * 2), "down": (11008, (4096,))}
ROWS, ADAPTERS, RANK, THREADS = 16, 8, 16, 128  # RANK, THREADS: as sgmv.cu has them
COPIES, LAUNCHES, WARM = 8, 7, 1  # of a layer's matrices, 160 MB of the 7B: none is in the L2 cache when it is read
# x A and its product with B in fp32, the sum rounded to fp16 once: relative to the largest output.
TOLERANCE = 2e-3


def segments(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row's adapter (-1: none) int32 (rows by adapter, where each adapter's begin and the last's end, the
    adapters)."""
    given = np.asarray(ids)
    rows = np.flatnonzero(given >= 0)
    rows = rows[np.argsort(given[rows], kind="stable")]
    adapters, counts = np.unique(given[rows], return_counts=True)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return rows.astype(np.int32), starts.astype(np.int32), adapters.astype(np.int32)


def expected(x: np.ndarray, a: np.ndarray, b: np.ndarray, y: np.ndarray, ids: Sequence[int], outs: Any) -> np.ndarray:
    """float64 [tokens, out_features]: y and what adapters add to it, of arrays as sgmv.cu takes them."""
    found = y.astype(np.float64)
    for row, adapter in enumerate(ids):
        if adapter < 0:
            continue
        shrunk, begin = a[adapter].astype(np.float64) @ x[row].astype(np.float64), 0
        for layer, out in enumerate(outs):
            own = shrunk[layer * RANK : (layer + 1) * RANK]
            found[row, begin : begin + out] += b[adapter, begin : begin + out].astype(np.float64) @ own
            begin += out
    return found


def bounds(outs: Sequence[int]) -> tuple[int, int]:
    """Where the second and the third layer begin among the columns of all."""
    ends = np.cumsum(outs).tolist()
    return ends[0], ends[min(1, len(ends) - 1)]


def measure(groups: Mapping[str, tuple[int, Sequence[int]]] = GROUPS, adapters: int = ADAPTERS) -> dict[str, Any]:
    """Microseconds of ROWS rows in turn of `adapters` adapters, by group and kernel, and of a whole decoder layer.

    groups: (in_features, out_features of each layer). Raises CheckError for outputs that are off NumPy's.
    """
    from lockstep.backends.tensorrt import cuda

    module, stream = cuda.compile_kernels(SOURCE), cuda.Stream()
    ids = [row % adapters for row in range(ROWS)]
    order = [_up(stream, array) for array in segments(ids)]
    found: dict[str, Any] = {}
    works: list[Callable[[int], None]] = []
    held: list[Any] = []
    nbytes, worst = 0, 0.0
    for number, (name, (deep, outs)) in enumerate(groups.items()):
        random = np.random.default_rng(number)
        columns, wide = RANK * len(outs), sum(outs)
        x, y = (random.standard_normal((ROWS, size), np.float32).astype(np.float16) for size in (deep, wide))
        a = _numbers(random, (adapters, columns, deep), deep)
        b = _numbers(random, (adapters, wide, RANK), RANK)
        arrays = [_copies(stream, a), _copies(stream, b)]
        given, out, shrunk = _up(stream, x), cuda.empty(y.shape, "f2"), cuda.empty((ROWS, columns), "f4")
        count, tiles = order[2].shape[0], -(-wide // THREADS)

        def shrink(
            copy: int,
            a: cuda.Array = arrays[0],
            given: Any = given,
            shrunk: Any = shrunk,
            blocks: int = count * columns,
            sizes: Any = (columns, deep // 8),
        ) -> None:
            module["sgmv_shrink"].launch(stream, blocks, THREADS, given, a[copy : copy + 1], *order, shrunk, *sizes)

        def expand(
            copy: int,
            b: cuda.Array = arrays[1],
            shrunk: Any = shrunk,
            out: Any = out,
            blocks: int = count * tiles,
            sizes: Any = (columns, wide, *bounds(outs)),
        ) -> None:
            module["sgmv_expand"].launch(stream, blocks, THREADS, shrunk, b[copy : copy + 1], *order, out, *sizes)

        stream.upload(out, y)
        shrink(0)
        expand(0)
        made = np.empty_like(y)
        stream.download(made, out)
        stream.synchronize()
        right = expected(x, a, b, y, ids, outs)
        error = float(np.abs(made - right).max() / np.abs(right).max())
        if not error < TOLERANCE:
            raise CheckError(f"sgmv: {name}: expected outputs within {TOLERANCE} of NumPy's, found {error:.3g}")
        worst, nbytes = max(worst, error), nbytes + a.nbytes + b.nbytes
        held += [arrays, given, out, shrunk]
        works += [shrink, expand]
        found[name] = {"shrink_us": _time(stream, [shrink]), "expand_us": _time(stream, [expand])}
    parts = [{key: round(each[key], 2) for key in each} for each in found.values()]
    return {
        "rows": ROWS,
        "adapters": adapters,
        "rank": RANK,
        "layer_us": round(_time(stream, works), 2),
        "shrink_us": round(_time(stream, works[::2]), 2),
        "expand_us": round(_time(stream, works[1::2]), 2),
        "groups": dict(zip(found, parts)),
        "mbytes": round(nbytes / 1e6, 2),
        "error": float(f"{worst:.2g}"),
    }


def _numbers(random: np.random.Generator, shape: tuple[int, ...], terms: int) -> np.ndarray:
    """fp16 of a size at which a sum of `terms` products with numbers of about 1 is about 1."""
    return (random.standard_normal(shape, np.float32) / np.float32(terms**0.5)).astype(np.float16)


def _up(stream: cuda.Stream, host: np.ndarray) -> cuda.Array:
    from lockstep.backends.tensorrt import cuda

    array = cuda.empty(host.shape, host.dtype)
    stream.upload(array, host)
    stream.synchronize()
    return array


def _copies(stream: cuda.Stream, host: np.ndarray) -> cuda.Array:
    """[COPIES, ...] on the device, all the same."""
    from lockstep.backends.tensorrt import cuda

    array = cuda.empty((COPIES, *host.shape), host.dtype, "copies of adapters")
    for number in range(COPIES):
        stream.upload(array[number : number + 1], host)
    stream.synchronize()
    return array


def _time(stream: cuda.Stream, works: Sequence[Callable[[int], None]]) -> float:
    """Microseconds of all works on one copy: the median over launches of a graph of all copies."""
    from lockstep.backends.tensorrt import cuda

    with stream.capture() as graph:
        for copy in range(COPIES):
            for work in works:
                work(copy)
    found = []
    for number in range(WARM + LAUNCHES):
        before, after = cuda.Event(), cuda.Event()
        before.record(stream)
        graph.launch(stream)
        after.record(stream)
        after.wait()
        if number >= WARM:
            found.append(after.milliseconds_since(before) * 1e3 / COPIES)
    return statistics.median(found)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(), indent=2) + "\n", encoding="utf-8")
