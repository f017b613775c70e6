"""Grouped GEMMs with the weights of experts on a device.

Weights are of 16 bits (expert_products.cu), float32 (float32_products.cu), integers or MXFP4 (expert_small_weights.cu).
The rows of a step are sorted by expert first (sort_by_expert.cu).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from lockstep.onnx_tools.products import ExpertWeight
from lockstep_gpu import cuda
from lockstep_gpu.kernels.library import including, kind_options

_SORT_THREADS = 1024


@dataclass(frozen=True)
class Tile:
    """Tile sizes that the kernels are compiled for.

    Attributes:
        rows, outputs, threads: Of a block.
        columns, stages: Of weights of 16 bits, and of quantized ones.
        max_rows: Average rows per expert up to which this tile is used.
    """

    rows: int
    outputs: int
    threads: int
    columns: tuple[int, int]
    stages: tuple[int, int]
    max_rows: float

    def shared(self, bits: int) -> int:
        """Return the bytes of shared memory of a block: the stages, which its results reuse."""
        columns = self.columns[bits < 16]
        stages = self.stages[bits < 16]
        stage = columns * (self.rows * 2 + self.outputs * bits // 8)
        return max(stages * stage, self.rows * (self.outputs + 8) * 2)

    def count(self, rows: int, experts: int) -> int:
        """Return the largest number of tiles that `rows` rows can need, however they are routed."""
        used_experts = min(rows, experts)
        return used_experts + (rows - used_experts) // self.rows


# A row has the same bits with any of them. The last one is for 16 bits only: dequantizing needs more registers.
TILES = (
    Tile(8, 32, 128, (256, 256), (4, 4), 4),
    Tile(16, 32, 128, (256, 256), (4, 4), 12),
    Tile(64, 128, 256, (64, 128), (4, 3), 48),
    Tile(128, 128, 256, (64, 64), (3, 3), float("inf")),
)


def tile_for(rows: int, experts: int, largest: Tile) -> Tile:
    return next((tile for tile in TILES[: TILES.index(largest)] if rows <= tile.max_rows * experts), largest)


@dataclass(frozen=True)
class ExpertStack:
    """The stacked weights of all experts on a device.

    data: floats [count, ...], or uint8. scales: fp16 [count, out_features, num_groups], times `SCALES_TIMES`, or
    uint8 exponents (MXFP4); None for 16 bits.
    """

    data: cuda.Array
    scales: cuda.Array | None
    form: ExpertWeight


class ExpertOrder:
    """The rows of a step, sorted by expert."""

    def __init__(
        self, stream: cuda.Stream, ids: cuda.Array, experts: int, rows: cuda.Array, tiles: cuda.Array, largest: Tile
    ):
        """Bind the sort to arrays of the largest step.

        Args:
            ids: int32 [tokens, per_token], each token's experts.
            rows: int32 [tokens * per_token], the result.
            tiles: int32 [tokens * per_token, 4], the expert and rows of each tile.
            largest: The largest tile that all GEMMs of these rows support.
        """
        self.per_token = ids.shape[1]
        self.rows = rows
        self.tiles = tiles
        self._experts = experts
        self._largest = largest
        kernel = cuda.compile_kernels(including("sort_by_expert.cu"))["sort_by_expert"]

        @functools.cache
        def launch(tile: Tile) -> cuda.Launch:
            return cuda.Launch(kernel, stream, _SORT_THREADS, ids, rows, tiles, experts, tile.rows, 0, overlaps=True)

        self._launch = launch

    def tile(self, tokens: int) -> tuple[Tile, int]:
        """Return the tile for a number of tokens, and the largest number of tiles."""
        rows = tokens * self.per_token
        tile = tile_for(rows, self._experts, self._largest)
        return tile, tile.count(rows, self._experts)

    def sort(self, tokens: int) -> None:
        """Enqueue the sort of the rows of `tokens` tokens."""
        tile, _ = self.tile(tokens)
        self._launch(tile)(1, tokens * self.per_token)


def bind(
    stream: cuda.Stream, stack: ExpertStack, x: cuda.Array, out: cuda.Array, order: ExpertOrder, shared: bool
) -> Callable[[int], None]:
    """Return a call that multiplies the rows of a number of tokens with their experts' weights.

    Args:
        x: [tokens, in_features] if a token's experts share a row (`shared`), else [tokens, per_token * in_features].
        out: [tokens, per_token * out_features].
    """
    form = stack.form
    is_float32 = x.dtype.name == "float32"
    if stack.scales is not None:
        file = "expert_small_weights.cu"
    elif is_float32:
        file = "float32_products.cu"
    else:
        file = "expert_products.cu"
    module = cuda.compile_kernels(including(file), kind_options(x.dtype.name))

    @functools.cache
    def launch(tile: Tile) -> tuple[cuda.Launch, int]:
        blocks = -(-form.out_features // tile.outputs)
        rows_per_input = order.per_token if shared else 1
        rows: tuple[cuda.Array | int, ...] = (x, out, order.rows, order.tiles, rows_per_input)
        sizes: tuple[int, ...] = (form.out_features, form.in_features)
        arguments: tuple[cuda.Array | int, ...]
        if stack.scales is None:
            name = "across"  # weights as the graph has them: [in_features, out_features]
            if form.transposed:
                name = "experts"
            arguments = (stack.data, *rows, *sizes, blocks)
        else:
            name = f"small_{form.bits}"
            if form.kind == "mxfp4":
                name = "e2m1"
            arguments = (stack.data, stack.scales, *rows, *sizes, form.group_size, blocks)
        nbytes = 0  # the kernels of float32 declare their shared memory
        if not is_float32:
            nbytes = tile.shared(form.bits)
        kernel = module[f"{name}_{tile.rows}"]
        return cuda.Launch(kernel, stream, tile.threads, *arguments, overlaps=True, shared=nbytes), blocks

    def multiply(tokens: int) -> None:
        tile, count = order.tile(tokens)
        call, blocks = launch(tile)
        call(blocks * count)

    return multiply


def largest_tile(weights: Iterable[ExpertWeight], dtype: np.dtype) -> Tile:
    """Return the largest tile that GEMMs with all these weights support; dtype: of activations."""
    has_largest = dtype.itemsize == 2 and all(form.bits == 16 for form in weights)
    if has_largest:
        return TILES[-1]
    return TILES[-2]
