"""Products with the weights of experts on a device: expert_products.cu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.gpu import cuda
from lockstep.gpu.kernels.gemm import FEW_ROWS

SOURCE = FEW_ROWS + Path(__file__).with_name("expert_products.cu").read_text(encoding="utf-8")
MOST_EXPERTS = _SORT_THREADS = 1024


@dataclass(frozen=True)
class Tile:
    """A form of the kernel, as in expert_products.cu; most: rows of an expert up to which it is taken, on average."""

    rows: int
    outputs: int
    columns: int
    stages: int
    threads: int
    most: float

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a block."""
        return max(
            self.stages * (self.rows + self.outputs) * self.columns * 2,  # stages
            self.rows * (self.outputs + 8) * 2,  # results
        )

    def count(self, rows: int, experts: int) -> int:
        """Return how many tiles `rows` rows are at most, however they are shared out."""
        some = min(rows, experts)
        return some + (rows - some) // self.rows


# Whichever is taken, a row has the same bits.
TILES = (
    Tile(8, 32, 256, 4, 128, 4),
    Tile(16, 32, 256, 4, 128, 12),
    Tile(64, 128, 64, 4, 256, 48),
    Tile(128, 128, 64, 3, 256, float("inf")),
)


def tile_for(rows: int, experts: int) -> Tile:
    return next(tile for tile in TILES if rows <= tile.most * experts)


class ExpertOrder:
    """The rows of a step, sorted by their experts.

    ids: int32 [tokens, per_token], of the largest step. rows, tiles: int32 [tokens * per_token] and four times that.
    """

    def __init__(self, stream: cuda.Stream, ids: cuda.Array, experts: int, rows: cuda.Array, tiles: cuda.Array):
        self.per_token, self.rows, self.tiles = ids.shape[1], rows, tiles
        kernel = cuda.compile_kernels(SOURCE)["sort_by_expert"]

        @functools.cache
        def launch(tile: Tile) -> cuda.Launch:
            given = ids, rows, tiles, experts, tile.rows, 0
            return cuda.Launch(kernel, stream, _SORT_THREADS, *given, overlaps=True)

        self._experts, self._launch = experts, launch

    def sort(self, tokens: int) -> None:
        """Put the sort of so many tokens' rows on the stream."""
        rows = tokens * self.per_token
        self._launch(tile_for(rows, self._experts))(1, rows)


def bind(
    stream: cuda.Stream,
    stack: cuda.Array,
    x: cuda.Array,
    out: cuda.Array,
    order: ExpertOrder,
    shared: bool,
    transposed: bool,
) -> Callable[[int], None]:
    """Return a call that multiplies the rows of so many tokens with their experts' weights, in the order of `order`.

    stack: fp16 [experts, out_features, in_features], if `transposed`, else [experts, in_features, out_features].
    x: [tokens, in_features] if a token's experts share a row, else [tokens, per_token * in_features]. out [tokens,
    per_token * out_features].
    """
    experts, *sizes = stack.shape
    out_features, in_features = sizes if transposed else reversed(sizes)

    @functools.cache
    def launch(tile: Tile) -> tuple[cuda.Launch, int]:
        kernel = cuda.compile_kernels(SOURCE)[f"{'experts' if transposed else 'across'}_{tile.rows}"]
        blocks = -(-out_features // tile.outputs)
        given: tuple[cuda.Array | int, ...] = (stack, x, out, order.rows, order.tiles)
        given += (order.per_token if shared else 1, out_features, in_features, blocks)
        return cuda.Launch(kernel, stream, tile.threads, *given, overlaps=True, shared=tile.shared), blocks

    def multiply(tokens: int) -> None:
        rows = tokens * order.per_token
        tile = tile_for(rows, experts)
        call, blocks = launch(tile)
        call(blocks * tile.count(rows, experts))

    return multiply
