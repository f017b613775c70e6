"""GEMM of e4m3 weights, which have a scale a row, and fp16 rows, which become e4m3 with a scale each.

Rows become e4m3 by a kernel, or by the one that makes them (row_kernels.py). Up to 16 are multiplied by another, which
reads each byte of a weight once (fp8_products.cu), more by cuBLASLt. On Hopper its tensor cores round sums of e4m3
numbers otherwise than those of fp16, so that bits depend on the number of rows. Where cuBLAS has no such product (it
has them for Hopper), the kernel takes all rows, 16 at a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.artifacts.dtypes import named_dtype
from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.kernels.cublas_lt import Algorithm, CublasLt
from lockstep.gpu.kernels.gemm import (
    FEW,
    FEW_ROWS,
    MANY,
    MOST_OUTPUTS,
    OUTPUTS,
    TIMED,
    Trial,
    few_rows_launch,
    size_for,
)

SOURCE = FEW_ROWS + "".join(
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("e4m3.cu", "fp8_products.cu")
)
_ROW_THREADS = 512  # as in fp8_products.cu
_CUBLAS_ALIGNED = 16  # numbers that rows and outputs of cuBLAS's products are a multiple of
Multiplier = Callable[[int], None]
Rows = tuple[cuda.Array, cuda.Array]  # codes uint8 [rows, in_features], steps float32 [rows]


class Fp8Gemm:
    """Products with e4m3 weights on a stream."""

    def __init__(self, stream: cuda.Stream):
        self._stream, self._module, self._shapes = stream, cuda.compile_kernels(SOURCE), _shapes(cuda.current_device())
        self._rooms: dict[int, Rows] = {}

    def bind(
        self,
        weight: cuda.Array,
        scales: cuda.Array,
        x: cuda.Array,
        outs: Sequence[cuda.Array],
        rows: Rows | None = None,
    ) -> Multiplier:
        """Return a call that multiplies so many rows of `x` with weights that lie one behind the other.

        outs[i] [..., out_features[i]] = x [..., in_features] times weight i, transposed. weight e4m3 [sum of
        out_features, in_features]; scales float32 [sum of out_features]. rows: `x` as e4m3, where it is made already.
        """
        depth = weight.shape[1]
        codes, steps = rows or self._room(x.shape[0], depth)
        quantize: cuda.Launch | None = None
        if rows is None:
            kernel = self._module["quantize_rows"]
            quantize = cuda.Launch(kernel, self._stream, _ROW_THREADS, x, codes, steps, depth, overlaps=True)
        ends = [0, *itertools.accumulate(out.shape[-1] for out in outs)]
        parts = [(weight[low:high], scales[low:high], out) for low, high, out in zip(ends, ends[1:], outs)]
        few, shapes = functools.cache(functools.partial(self._few, weight, scales, codes, steps, outs)), self._shapes

        @functools.cache
        def by_cublas() -> list[Callable[[int, Algorithm], None]] | None:
            if not all(shapes[part.shape[0], depth] for part, _, _ in parts):
                return None
            assert shapes.library is not None  # it has products of these shapes
            bind = functools.partial(shapes.library.bind, self._stream)
            return [bind(part, codes, out, own, steps) for part, own, out in parts]

        def multiply(rows: int) -> None:
            if quantize is not None:
                quantize(rows)
            calls = by_cublas() if rows > FEW[-1] else None
            if calls is not None:
                size = size_for(rows, MANY)
                for call, (part, _, _) in zip(calls, parts):
                    call(rows, shapes[part.shape[0], depth][size])
                return
            for first in range(0, rows, FEW[-1]):
                count = min(rows - first, FEW[-1])
                for launch, blocks in few(first, size_for(count, FEW)):
                    launch(blocks, count)

        return multiply

    def _room(self, rows: int, columns: int) -> Rows:
        """Return memory for rows as e4m3 and their steps, which all products of a width share: calls follow each other.

        Earlier, smaller ones stay valid with those that hold them.
        """
        room = self._rooms.get(columns)
        if room is None or room[0].shape[0] < rows:
            codes = cuda.empty((rows, columns), "u1", "activations as e4m3")
            room = self._rooms[columns] = codes, cuda.empty((rows,), "f4", "scales of activations")
        return room

    def _few(
        self,
        weight: cuda.Array,
        scales: cuda.Array,
        codes: cuda.Array,
        steps: cuda.Array,
        outs: Sequence[cuda.Array],
        first: int,
        most: int,
    ) -> list[tuple[cuda.Launch, int]]:
        """Return launches of the kernel, and their blocks, for at most `most` rows from `first` on."""
        launches, start = [], 0
        for at in range(0, len(outs), MOST_OUTPUTS):
            own = outs[at : at + MOST_OUTPUTS]
            ends = [*itertools.accumulate(out.shape[-1] for out in own)]
            total = ends[-1]
            to = [out[first:] for out in (*own, own[-1], own[-1])][:MOST_OUTPUTS]
            of_weight = weight[start : start + total], scales[start : start + total]
            given: tuple[cuda.Array | int, ...]
            given = *of_weight, codes[first:], steps[first:], *to, *[*ends, total, total][: MOST_OUTPUTS - 1]
            kernel = self._module[f"few_rows_fp8_{most}"]
            launch = few_rows_launch(kernel, self._stream, most, *given, total, weight.shape[1], most)
            launches.append((launch, -(-total // OUTPUTS)))
            start += total
        return launches


@functools.cache
def _shapes(device: int) -> _Shapes:
    return _Shapes()


class _Shapes:
    """What cuBLAS multiplies with for weights of each shape, [out_features, in_features], on a device: found once.

    library: None for one that knows no e4m3 with a scale a row.
    """

    def __init__(self) -> None:
        self.library: CublasLt | None = None
        with contextlib.suppress(CheckError):
            self.library = CublasLt(fp8=True)
        self._found: dict[tuple[int, int], Mapping[int, Algorithm]] = {}

    def __getitem__(self, shape: tuple[int, int]) -> Mapping[int, Algorithm]:
        """Return algorithms by the number of rows up to which each is taken; none where cuBLAS has no product."""
        if shape not in self._found:
            known = self.library is not None and not any(size % _CUBLAS_ALIGNED for size in shape)
            self._found[shape] = self._choose(self.library, *shape) if known and self.library is not None else {}
        return self._found[shape]

    @staticmethod
    def _choose(library: CublasLt, out_features: int, in_features: int) -> Mapping[int, Algorithm]:
        trial = Trial(out_features, in_features, TIMED, named_dtype("float8_e4m3fn"))
        of_weight, of_rows = cuda.empty((out_features,), "f4"), cuda.empty((TIMED,), "f4")
        for array in (of_weight, of_rows):
            trial.stream.upload(array, np.ones(array.shape, np.float32))
        trial.stream.synchronize()
        calls = [library.bind(trial.stream, weight, trial.x, trial.out, of_weight, of_rows) for weight in trial.weights]
        offered = {size: list(library.algorithms(out_features, in_features, size)) for size in MANY}
        running = list[Algorithm]()
        for algorithm in dict.fromkeys(itertools.chain.from_iterable(offered.values())):
            with contextlib.suppress(CheckError):  # what is offered may not run
                calls[0](TIMED, algorithm)
                running.append(algorithm)
        trial.stream.synchronize()
        if not running:
            return {}
        timed = {each: [(call, each) for call in calls] for each in running}
        fastest = {
            size: trial.fastest(
                {key: [functools.partial(call, size, each) for call, each in pairs] for key, pairs in timed.items()}
            )
            for size in MANY
            if size <= TIMED
        }
        larger = {size: [each for each in offered[size] if each in running] for size in MANY if size > TIMED}
        return fastest | {size: (each or [fastest[TIMED]])[0] for size, each in larger.items()}
