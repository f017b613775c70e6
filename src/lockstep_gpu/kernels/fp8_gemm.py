"""GEMM of e4m3 weights with a scale per output, and rows of 16 bits, which are quantized to e4m3 with a scale per row.

A kernel quantizes the rows, or the kernel that computes them does (row_kernels.py). Up to 8 rows are multiplied by a
kernel that reads each byte of a weight once (fp8_products.cu), up to 128 by a tiled kernel (fp8_wgmma.cu), more by
cuBLASLt. Tensor cores round sums of e4m3 products differently from those of fp16, so the bits depend on the number of
rows. On GPUs other than Hopper, and for sizes that the tiled kernel doesn't support, the first kernel takes up to 16
rows, or all rows, 16 at a time, if cuBLAS has no such GEMM.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.artifacts.dtypes import named_dtype
from lockstep.errors import CheckError
from lockstep_gpu import cuda
from lockstep_gpu.kernels.cublas_lt import Algorithm, CublasLt
from lockstep_gpu.kernels.gemm import (
    CUBLAS_ROWS,
    KERNEL_ROWS,
    MAX_TIMED_ROWS,
    OUTPUTS,
    Trial,
    few_rows_launch,
    output_arguments,
    output_groups,
    size_for,
)
from lockstep_gpu.kernels.library import including, kind_options

_E4M3 = named_dtype("float8_e4m3fn")
_TILE_THREADS = 288  # as in fp8_wgmma.cu
_ROW_THREADS = 512  # as in fp8_products.cu
# As in fp8_wgmma.cu: outputs and columns of a tile, and its rows.
_TILE = 128
_TILE_ROWS = 64
_STAGES = 3  # of the ring buffer
_SPLIT_STAGES = 4  # if the columns of a tile are split among blocks
# A tile is split while all blocks run at once on an H100. The bits depend on the split, so it is the same on any GPU.
_CONCURRENT_BLOCKS = 200
_LOADED_ROWS = (16, 32, 64)  # rows that TMA loads at once; with more, each of a pair of blocks loads its own
_TILED_ROWS = range(9, 129)  # rows for which the tiled kernel is the fastest
_CUBLAS_ALIGNED = 16  # cuBLAS's e4m3 GEMMs need multiples of this many columns and outputs
Multiplier = Callable[[int], None]


class QuantizedRows(NamedTuple):
    """QuantizedRows as e4m3: codes uint8 [rows, in_features], and the scale of each row, float32 [rows]."""

    codes: cuda.Array
    scales: cuda.Array


class Fp8Gemm:
    """Products with e4m3 weights on a stream."""

    def __init__(self, stream: cuda.Stream, dtype: np.dtype):
        """dtype: of rows and outputs, fp16 or bf16."""
        device = cuda.current_device()
        self._stream = stream
        self._shapes = _shapes(device, dtype)
        self._hopper = cuda.is_hopper(device)
        files = ["fp8_products.cu"]
        if self._hopper:
            files.append("fp8_wgmma.cu")
        self._module = cuda.compile_kernels(including(*files), kind_options(dtype.name))
        self._quantized_rows: dict[int, QuantizedRows] = {}  # by their columns

    def bind(
        self,
        weight: cuda.Array,
        scales: cuda.Array,
        x: cuda.Array,
        outs: Sequence[cuda.Array],
        quantized: QuantizedRows | None = None,
    ) -> Multiplier:
        """Return a call that computes outs[i] = x @ weight[i].T for a number of rows.

        Args:
            weight: Concatenated weights, e4m3 [sum of out_features, in_features].
            scales: float32 [sum of out_features].
            x: [..., in_features].
            outs: Each [..., out_features[i]].
            quantized: `x` as e4m3, if a kernel has quantized it already.
        """
        depth = weight.shape[1]
        quantize: cuda.Launch | None = None
        if quantized is None:
            quantized = self._row_memory(x.shape[0], depth)
            kernel = self._module["quantize_rows"]
            quantize = cuda.Launch(kernel, self._stream, _ROW_THREADS, x, *quantized, depth, overlaps=True)
        codes, row_scales = quantized
        parts = [(weight[rows], scales[rows], out) for rows, (out,) in output_groups(outs, 1)]
        product = _Product(weight, scales, quantized, outs)
        shapes = self._shapes
        few_rows_launches = functools.cache(functools.partial(self._few_rows_launches, product))
        tile_calls = functools.cache(lambda rows: [self._tile_call(product, rows, *part) for part in product.parts()])
        has_tiles = self._hopper and not any(
            size % _CUBLAS_ALIGNED for size in (depth, *(out.shape[-1] for out in outs))
        )

        @functools.cache
        def by_cublas() -> list[Callable[[int, Sequence[Algorithm]], None]] | None:
            if not all(shapes[part.shape[0], depth] for part, _, _ in parts):
                return None
            assert shapes.library is not None  # it has GEMMs of these shapes
            bind = functools.partial(shapes.library.bind, self._stream)
            return [bind(part, codes, out, part_scales, row_scales) for part, part_scales, out in parts]

        def multiply(rows: int) -> None:
            if quantize is not None:
                quantize(rows)
            if has_tiles and rows in _TILED_ROWS:
                for tile_call in tile_calls(size_for(rows, _LOADED_ROWS) * -(-rows // _TILE_ROWS)):
                    tile_call(rows)
                return
            calls = None
            if rows > KERNEL_ROWS[-1]:
                calls = by_cublas()
            if calls is not None:
                size = size_for(rows, CUBLAS_ROWS)
                for call, (part, _, _) in zip(calls, parts):
                    call(rows, shapes[part.shape[0], depth][size])
                return
            for first in range(0, rows, KERNEL_ROWS[-1]):
                count = min(rows - first, KERNEL_ROWS[-1])
                for launch, blocks in few_rows_launches(first, size_for(count, KERNEL_ROWS)):
                    launch(blocks, count)

        return multiply

    def _row_memory(self, rows: int, columns: int) -> QuantizedRows:
        """Return memory for quantized rows, which all GEMMs of this width share, because they run one after another.

        A GEMM that was bound to an earlier, smaller array keeps it.
        """
        memory = self._quantized_rows.get(columns)
        if memory is None or memory.codes.shape[0] < rows:
            codes = cuda.empty((rows, columns), "u1", "activations as e4m3")
            memory = QuantizedRows(codes, cuda.empty((rows,), "f4", "scales of activations"))
            self._quantized_rows[columns] = memory
        return memory

    def _few_rows_launches(self, product: _Product, first: int, max_rows: int) -> list[tuple[cuda.Launch, int]]:
        """Return launches of the kernel, and their blocks, for up to `max_rows` rows from row `first` on."""
        launches = []
        kernel = self._module[f"few_rows_fp8_{max_rows}"]
        for weight, scales, outs in product.parts():
            out_arguments = output_arguments([out[first:] for out in outs])
            arguments: tuple[cuda.Array | int, ...] = (
                weight, scales, product.x.codes[first:], product.x.scales[first:], *out_arguments, *weight.shape,
                max_rows,
            )  # fmt: skip
            launch = few_rows_launch(kernel, self._stream, max_rows, *arguments)
            launches.append((launch, -(-weight.shape[0] // OUTPUTS)))
        return launches

    def _tile_call(
        self, product: _Product, max_rows: int, weight: cuda.Array, scales: cuda.Array, outs: Sequence[cuda.Array]
    ) -> Callable[[int], None]:
        """Return a call of the tiled kernel for up to `max_rows` rows."""
        pair = max(1, max_rows // _TILE_ROWS)  # blocks of a cluster, which share a tile of the weight
        loaded = min(max_rows, _TILE_ROWS)
        tiles = -(-weight.shape[0] // _TILE)
        split = next((split for split in (4, 2) if tiles * split * pair <= _CONCURRENT_BLOCKS), 1)
        stages = _SPLIT_STAGES
        if split == 1:
            stages = _STAGES
        shared = 1024 + stages * (_TILE + _TILE_ROWS) * _TILE
        if split == 1:
            shared += _TILE_ROWS * (_TILE + 4) * 4  # the results of a tile in fp32, with padded rows
        arguments: tuple[cuda.Array | cuda.TensorMap | int, ...] = (
            cuda.TensorMap.of(weight, _TILE // pair, _TILE), cuda.TensorMap.of(product.x.codes, loaded, _TILE),
            scales, product.x.scales, *output_arguments(outs), *weight.shape, loaded, max_rows,
        )  # fmt: skip
        kernel = self._module[f"wgmma_fp8_{pair}_{split}"]
        launch = cuda.Launch(kernel, self._stream, _TILE_THREADS, *arguments, overlaps=True, shared=shared)
        resident_blocks = cuda.multiprocessors(cuda.current_device()) * 2 // pair * pair

        def multiply(rows: int) -> None:
            blocks = tiles * split * pair * -(-rows // (_TILE_ROWS * pair))
            if split == 1:  # persistent blocks: each computes several tiles
                blocks = min(blocks, resident_blocks)
            launch(blocks, rows)

        return multiply


@dataclass(frozen=True)
class _Product:
    """A GEMM of quantized rows with concatenated weights, which have a scale per output."""

    weight: cuda.Array
    scales: cuda.Array
    x: QuantizedRows
    outs: Sequence[cuda.Array]

    def parts(self) -> Iterator[tuple[cuda.Array, cuda.Array, Sequence[cuda.Array]]]:
        """Yield the weights, scales and outputs of each launch."""
        for rows, outs in output_groups(self.outs):
            yield self.weight[rows], self.scales[rows], outs


@functools.cache
def _shapes(device: int, dtype: np.dtype) -> _Shapes:
    return _Shapes(dtype)


class _Shapes:
    """cuBLAS's algorithms for weights of each shape, [out_features, in_features], on a device: chosen once per shape.

    library: None if it doesn't support e4m3 with a scale per row.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self.library: CublasLt | None = None
        with contextlib.suppress(CheckError):
            self.library = CublasLt(_E4M3, dtype)
        self._chosen: dict[tuple[int, int], Mapping[int, Sequence[Algorithm]]] = {}

    def __getitem__(self, shape: tuple[int, int]) -> Mapping[int, Sequence[Algorithm]]:
        """Return algorithms, the best first, by the largest number of rows; none if cuBLAS has no such GEMM."""
        if shape not in self._chosen:
            if self.library is None or any(size % _CUBLAS_ALIGNED for size in shape):
                self._chosen[shape] = {}
            else:
                self._chosen[shape] = self._choose(self.library, *shape)
        return self._chosen[shape]

    def _choose(self, library: CublasLt, out_features: int, in_features: int) -> Mapping[int, Sequence[Algorithm]]:
        trial = Trial(out_features, in_features, MAX_TIMED_ROWS, _E4M3, self._dtype)
        scales = cuda.empty((out_features,), "f4")
        row_scales = cuda.empty((MAX_TIMED_ROWS,), "f4")
        for array in (scales, row_scales):
            trial.stream.upload(array, np.ones(array.shape, np.float32))
        trial.stream.synchronize()
        calls = [library.bind(trial.stream, weight, trial.x, trial.out, scales, row_scales) for weight in trial.weights]
        offered = {size: list(library.algorithms(out_features, in_features, size)) for size in CUBLAS_ROWS}
        running = list[Algorithm]()
        for algorithm in dict.fromkeys(itertools.chain.from_iterable(offered.values())):
            with contextlib.suppress(CheckError):  # an offered algorithm may not run
                calls[0](MAX_TIMED_ROWS, [algorithm])
                running.append(algorithm)
        trial.stream.synchronize()
        if not running:
            return {}
        chosen = dict[int, list[Algorithm]]()
        for size in CUBLAS_ROWS:
            if size <= MAX_TIMED_ROWS:
                timed = {}
                for algorithm in running:
                    timed[algorithm] = [functools.partial(call, size, [algorithm]) for call in calls]
                chosen[size] = trial.ranked(timed)
            else:
                best = [algorithm for algorithm in offered[size] if algorithm in running]
                chosen[size] = [*best, *chosen[MAX_TIMED_ROWS]]
        return chosen
