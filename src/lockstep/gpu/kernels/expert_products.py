"""Products with the weights of experts on a device.

fp16 (expert_products.cu), integers or MXFP4 (expert_small_weights.cu); the rows of a step are sorted by their experts
before (expert_rows.cu).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lockstep.gpu import cuda
from lockstep.gpu.kernels.gemm import FEW_ROWS
from lockstep.onnx_tools.expert_products import ExpertWeight

_ROWS, _FLOATS, _SMALL = (
    Path(__file__).with_name(f"expert_{name}.cu").read_text(encoding="utf-8")
    for name in ("rows", "products", "small_weights")
)
SORT = FEW_ROWS + _ROWS
SOURCES = {"floats": FEW_ROWS + _ROWS + _FLOATS, "small": FEW_ROWS + _ROWS + _SMALL}
MOST_EXPERTS = _SORT_THREADS = 1024


@dataclass(frozen=True)
class Tile:
    """A form of the kernels; most: rows of an expert up to which it is taken, on average.

    rows, outputs, threads: of a block. columns, stages: of fp16 weights, and of others.
    """

    rows: int
    outputs: int
    threads: int
    columns: tuple[int, int]
    stages: tuple[int, int]
    most: float

    def shared(self, bits: int) -> int:
        """Return the bytes of shared memory of a block: of stages, or of results."""
        columns = self.columns[bits < 16]
        stages = self.stages[bits < 16]
        stage = columns * (self.rows * 2 + self.outputs * bits // 8)
        return max(stages * stage, self.rows * (self.outputs + 8) * 2)

    def count(self, rows: int, experts: int) -> int:
        """Return how many tiles `rows` rows are at most, however they are shared out."""
        some = min(rows, experts)
        return some + (rows - some) // self.rows


# Whichever is taken, a row has the same bits. The last is for fp16 alone: registers are few.
TILES = (
    Tile(8, 32, 128, (256, 256), (4, 4), 4),
    Tile(16, 32, 128, (256, 256), (4, 4), 12),
    Tile(64, 128, 256, (64, 128), (4, 3), 48),
    Tile(128, 128, 256, (64, 64), (3, 3), float("inf")),
)


def tile_for(rows: int, experts: int, largest: Tile) -> Tile:
    return next((tile for tile in TILES[: TILES.index(largest)] if rows <= tile.most * experts), largest)


@dataclass(frozen=True)
class ExpertStack:
    """The weights of experts on a device.

    data: fp16 [count, ...], or uint8. scales: fp16 [count, out_features, num_groups], `SCALES_TIMES` as large, or
    exponents, uint8; None of fp16.
    """

    data: cuda.Array
    scales: cuda.Array | None
    form: ExpertWeight


class ExpertOrder:
    """The rows of a step, sorted by their experts.

    ids: int32 [tokens, per_token], of the largest step. rows, tiles: int32 [tokens * per_token] and four times that.
    largest: the largest tile that all products of these rows have.
    """

    def __init__(
        self, stream: cuda.Stream, ids: cuda.Array, experts: int, rows: cuda.Array, tiles: cuda.Array, largest: Tile
    ):
        self.per_token = ids.shape[1]
        self.rows = rows
        self.tiles = tiles
        self._experts = experts
        self._largest = largest
        kernel = cuda.compile_kernels(SORT)["sort_by_expert"]

        @functools.cache
        def launch(tile: Tile) -> cuda.Launch:
            given = ids, rows, tiles, experts, tile.rows, 0
            return cuda.Launch(kernel, stream, _SORT_THREADS, *given, overlaps=True)

        self._launch = launch

    def tile(self, tokens: int) -> tuple[Tile, int]:
        """Return the tile for so many tokens, and how many there are at most."""
        rows = tokens * self.per_token
        tile = tile_for(rows, self._experts, self._largest)
        return tile, tile.count(rows, self._experts)

    def sort(self, tokens: int) -> None:
        """Put the sort of so many tokens' rows on the stream."""
        tile, _ = self.tile(tokens)
        self._launch(tile)(1, tokens * self.per_token)


def bind(
    stream: cuda.Stream, stack: ExpertStack, x: cuda.Array, out: cuda.Array, order: ExpertOrder, shared: bool
) -> Callable[[int], None]:
    """Return a call that multiplies the rows of so many tokens with their experts' weights, in the order of `order`.

    x: [tokens, in_features] if a token's experts share a row, else [tokens, per_token * in_features]. out [tokens,
    per_token * out_features].
    """
    form = stack.form
    module = cuda.compile_kernels(SOURCES["floats" if stack.scales is None else "small"])

    @functools.cache
    def launch(tile: Tile) -> tuple[cuda.Launch, int]:
        blocks = -(-form.out_features // tile.outputs)
        sharing = order.per_token if shared else 1
        rows: tuple[cuda.Array | int, ...] = (x, out, order.rows, order.tiles, sharing)
        sizes: tuple[int, ...] = (form.out_features, form.in_features)
        if stack.scales is None:
            name = "experts" if form.transposed else "across"
            given = (stack.data, *rows, *sizes, blocks)
        else:
            name = "e2m1" if form.kind == "mxfp4" else f"small_{form.bits}"
            given = stack.data, stack.scales, *rows, *sizes, form.group_size, blocks
        nbytes = tile.shared(form.bits)
        kernel = module[f"{name}_{tile.rows}"]
        return cuda.Launch(kernel, stream, tile.threads, *given, overlaps=True, shared=nbytes), blocks

    def multiply(tokens: int) -> None:
        tile, count = order.tile(tokens)
        call, blocks = launch(tile)
        call(blocks * count)

    return multiply


def largest_tile(forms: Iterable[ExpertWeight]) -> Tile:
    """Return the largest tile that products of all these weights have."""
    return TILES[-1] if all(form.bits == 16 for form in forms) else TILES[-2]
