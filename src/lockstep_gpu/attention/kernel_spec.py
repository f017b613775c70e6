"""What the kernels of fused attention are compiled for (compute capability 8.0 or higher)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep_gpu.cuda import Array
from lockstep_gpu.kernels.library import KINDS

PAGE = 64  # tokens of a page of the cache
THREADS = 128  # of a block
SPLITS = 16  # of a row's keys at most, as in paged_decode.cu


def page_shape(pages: int, num_kv_heads: int, dim: int, fp8: bool = False) -> tuple[int, ...]:
    """Return the shape of the keys or values in a layer's pages.

    fp8: bytes. A head has 64 x `dim` e4m3 numbers, then their 64 scales (fp8_heads.cuh).
    """
    return (pages, num_kv_heads, PAGE * (dim + 1)) if fp8 else (pages, num_kv_heads, PAGE, dim)


@dataclass(frozen=True)
class DeviceRopeTables:
    """RoPE tables on the device: see `rope_tables.RopeTables`.

    first_weight, second_weight: [positions, head_dim] float32. partner: [head_dim] int32, the second element; the first
    is the element itself. Separate ones: [positions, 2, head_dim], and partner [2, 2, head_dim], of queries and keys.
    """

    first_weight: Array
    second_weight: Array
    partner: Array


@dataclass(frozen=True)
class PagedTokens:
    """A layer's new tokens, and the paged cache that they are written to.

    Attributes:
        query: [num_tokens, num_heads, query_dim], before RoPE. An attention sink is the last element of its head.
        key, value: [num_tokens, num_kv_heads, dim], before RoPE.
        keys, values: The cache, [pages, num_kv_heads, 64, dim], or of fp8 as in `page_shape`.
        rows: [num_tokens] int32, or -1: not written to the cache.
        positions: [num_tokens].
        pages: [rows, pages_per_row] int32: the page table.
    """

    query: Array
    key: Array
    value: Array
    keys: Array
    values: Array
    tables: DeviceRopeTables
    rows: Array
    positions: Array
    pages: Array

    def arguments(self, out: Array) -> tuple[Array | int, ...]:
        """Return the arguments that all kernels start with; out: their output besides the cache."""
        tables = self.tables
        arrays = self.query, self.key, self.value, out, self.keys, self.values
        rope = tables.first_weight, tables.second_weight, tables.partner
        return *arrays, *rope, self.rows, self.positions, self.pages, self.pages.shape[1]


@dataclass(frozen=True)
class AttentionKernelSpec:
    """What an attention kernel is compiled for.

    Attributes:
        dtype: Name of the dtype of the cache, values and outputs.
        query_dtype: Name of the dtype of queries and keys.
        wide: Positions are int64.
        window: The number of tokens that a token attends to, itself included; 0: no window.
        sinks: Each head has an attention sink: an extra logit, the last element of its query.
        fp8: The cache has e4m3 numbers.
        softcap: Of the scores; 0: none.
        separate_rope: Queries and keys have different RoPE tables, whose elements may move.
    """

    dtype: str
    query_dtype: str
    wide: bool
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int
    sinks: bool = False
    fp8: bool = False
    softcap: float = 0.0
    separate_rope: bool = False

    @property
    def by_row(self) -> bool:
        """Return whether the decode kernel runs prompts too, because not every cuDNN can."""
        if self.dtype == "float32":
            return True
        return bool(self.softcap) or max(self.head_dim, self.value_dim) > 256

    @property
    def options(self) -> tuple[str, ...]:
        values = {
            "KIND": KINDS[self.dtype],
            "QK_KIND": KINDS[self.query_dtype],
            "WIDE": int(self.wide),
            "KV_HEADS": self.kv_heads,
            "GROUP": self.heads // self.kv_heads,
            "HEADS": self.block_heads,
            "DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "WINDOW": self.window,
            "SINKS": int(self.sinks),
            "FP8": int(self.fp8),
            "SEPARATE": int(self.separate_rope),
            "SOFTCAP": int(np.float32(self.softcap).view(np.uint32)),
            "PAGE": PAGE,
            "THREADS": THREADS,
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())

    @property
    def block_heads(self) -> int:
        """Return the query heads of a block: the 8 columns of an MMA, or 4 if head_dim > 128, to save registers."""
        return min(self.heads // self.kv_heads, 4 if self.head_dim > 128 else 8)

    @property
    def blocks(self) -> int:
        """Return the blocks of a request in each share: KV heads x groups of their query heads."""
        return self.kv_heads * -(-self.heads // self.kv_heads // self.block_heads)

    def shares(self, requests: int, multiprocessors: int) -> int:
        """Return how many blocks share a row's splits: a power of two, for up to eight blocks per multiprocessor."""
        count = 1
        while count < SPLITS and 2 * count * requests * self.blocks <= 8 * multiprocessors:
            count *= 2
        return count
