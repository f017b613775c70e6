"""GEMM of e4m3 weights, which have a scale a row, and fp16 rows, which become e4m3 with a scale each.

Rows become e4m3 by a kernel, or by the one that makes them (row_kernels.py). Up to 8 are multiplied by another, which
reads each byte of a weight once (fp8_products.cu), up to 128 by one of tiles (fp8_wgmma.cu), more by cuBLASLt. Tensor
cores round sums of e4m3 numbers otherwise than those of fp16, so that bits depend on the number of rows. On other GPUs
than Hopper's, and for sizes that these do not take, the first kernel takes up to 16 rows, and where cuBLAS has no such
product all, 16 at a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    output_arguments,
    size_for,
)

SOURCE = FEW_ROWS + "".join(
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("e4m3.cu", "fp8_products.cu")
)
TILES = Path(__file__).with_name("fp8_wgmma.cu").read_text(encoding="utf-8")
# as in fp8_wgmma.cu and fp8_products.cu
_TILE_THREADS = 288
_ROW_THREADS = 512
# As in fp8_wgmma.cu: outputs and columns of a tile, its rows, and stages of a ring where it is split and where not. A
# tile is split among so many blocks that all run at once on an H100, on any GPU: bits follow from it.
_TILE = 128
_TILE_ROWS = 64
_RING = {True: 4, False: 3}
_AT_ONCE = 200
_LOADED = (16, 32, 64)  # rows that are brought at once; beyond, those of each of a pair of blocks
_TILED = range(9, 129)  # rows that tiles are sooner done with than other kernels
_CUBLAS_ALIGNED = 16  # numbers that rows and outputs of cuBLAS's products are a multiple of
Multiplier = Callable[[int], None]
Rows = tuple[cuda.Array, cuda.Array]  # codes uint8 [rows, in_features], steps float32 [rows]


class Fp8Gemm:
    """Products with e4m3 weights on a stream."""

    def __init__(self, stream: cuda.Stream):
        device = cuda.current_device()
        self._stream = stream
        self._shapes = _shapes(device)
        self._hopper = cuda.is_hopper(device)
        self._module = cuda.compile_kernels(SOURCE + TILES if self._hopper else SOURCE)
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
        product = _Product(weight, scales, codes, steps, outs)
        shapes = self._shapes
        few = functools.cache(functools.partial(self._few, product))
        tiles = functools.cache(functools.partial(self._tiles, product))
        whole = self._hopper and not any(size % _CUBLAS_ALIGNED for size in (depth, *ends))

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
            if whole and rows in _TILED:
                for tile in tiles(size_for(rows, _LOADED) * -(-rows // _TILE_ROWS)):
                    tile(rows)
                return
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

    def _few(self, product: _Product, first: int, most: int) -> list[tuple[cuda.Launch, int]]:
        """Return launches of the kernel, and their blocks, for at most `most` rows from `first` on."""
        launches = []
        kernel = self._module[f"few_rows_fp8_{most}"]
        for weight, scales, outs in product.parts():
            given: tuple[cuda.Array | int, ...]
            to = output_arguments([out[first:] for out in outs])
            given = weight, scales, product.codes[first:], product.steps[first:], *to
            launch = few_rows_launch(kernel, self._stream, most, *given, *weight.shape, most)
            launches.append((launch, -(-weight.shape[0] // OUTPUTS)))
        return launches

    def _tiles(self, product: _Product, most: int) -> list[Callable[[int], None]]:
        """Return calls of the kernel of tiles for up to `most` rows."""
        return [self._tiles_of_part(product, most, *part) for part in product.parts()]

    def _tiles_of_part(
        self, product: _Product, most: int, weight: cuda.Array, scales: cuda.Array, outs: Sequence[cuda.Array]
    ) -> Callable[[int], None]:
        pair = max(1, most // _TILE_ROWS)
        loaded = min(most, _TILE_ROWS)
        tiles = -(-weight.shape[0] // _TILE)
        split = next((split for split in (4, 2) if tiles * split * pair <= _AT_ONCE), 1)
        maps = cuda.TensorMap.of(weight, _TILE // pair, _TILE), cuda.TensorMap.of(product.codes, loaded, _TILE)
        stages = _RING[split > 1] * (_TILE + _TILE_ROWS) * _TILE
        shared = 1024 + stages + (_TILE_ROWS * (_TILE + 4) * 4 if split == 1 else 0)
        given: tuple[cuda.Array | cuda.TensorMap | int, ...]
        given = *maps, scales, product.steps, *output_arguments(outs), *weight.shape, loaded, most
        kernel = self._module[f"wgmma_fp8_{pair}_{split}"]
        launch = cuda.Launch(kernel, self._stream, _TILE_THREADS, *given, overlaps=True, shared=shared)
        at_once = cuda.multiprocessors(cuda.current_device()) * 2

        def multiply(rows: int) -> None:
            blocks = tiles * split * pair * -(-rows // (_TILE_ROWS * pair))
            launch(blocks if split > 1 else min(blocks, at_once // pair * pair), rows)

        return multiply


@dataclass(frozen=True)
class _Product:
    """Weights one behind the other, their scales, rows as e4m3 with their steps, and what comes out."""

    weight: cuda.Array
    scales: cuda.Array
    codes: cuda.Array
    steps: cuda.Array
    outs: Sequence[cuda.Array]

    def parts(self) -> Iterator[tuple[cuda.Array, cuda.Array, Sequence[cuda.Array]]]:
        """Yield the weights, scales and outputs of each launch."""
        start = 0
        for at in range(0, len(self.outs), MOST_OUTPUTS):
            outs = self.outs[at : at + MOST_OUTPUTS]
            rows = slice(start, start + sum(out.shape[-1] for out in outs))
            yield self.weight[rows], self.scales[rows], outs
            start = rows.stop


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
        of_weight = cuda.empty((out_features,), "f4")
        of_rows = cuda.empty((TIMED,), "f4")
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
        fastest = {
            size: trial.fastest({each: [functools.partial(call, size, each) for call in calls] for each in running})
            for size in MANY
            if size <= TIMED
        }
        larger = {size: [each for each in offered[size] if each in running] for size in MANY if size > TIMED}
        return fastest | {size: (each or [fastest[TIMED]])[0] for size, each in larger.items()}
