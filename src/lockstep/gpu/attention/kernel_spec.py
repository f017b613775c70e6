"""The kernels of fused attention: what they are compiled for (8.0 or higher), and shared CUDA C++."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.gpu.cuda import Array
from lockstep.gpu.kernels.step_kernels import NUMBERS

PAGE = 64  # tokens of a page of the cache
# of a block; of a row at most, as paged_decode.cu has them
THREADS = 128
SPLITS = 16
# In CUDA C++, with the macros of AttentionKernelSpec.options.
WORDS = r"""
typedef unsigned short Bits;  // a number of KIND
struct __align__(16) Vec8 { unsigned w[4]; };  // 8 numbers of KIND
struct __align__(16) Four { float w[4]; };

#if GIVEN == 0
typedef float Given;
#else
typedef unsigned short Given;
#endif

__device__ __forceinline__ float number(float given) { return given; }
__device__ __forceinline__ float number(unsigned short given) {
    float result;
    if (GIVEN == 1) asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(given));
    else result = __uint_as_float((unsigned)given << 16);
    return result;
}

#if KIND == 1
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned result;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// RoPE of one element, by intrinsics that leave the compiler no choice of roundings, so that all kernels cache the same numbers.
__device__ __forceinline__ float rope(float x, float own, float y, float other) { return __fmaf_rn(y, other, __fmul_rn(x, own)); }
"""  # noqa: E501


FP8_WORDS = Path(__file__).with_name("fp8_heads.cu").read_text(encoding="utf-8")


def page_shape(pages: int, num_kv_heads: int, dim: int, fp8: bool = False) -> tuple[int, ...]:
    """Return the shape of the keys or values of a layer's pages.

    fp8: in bytes, of a head 64 times `dim` e4m3 numbers, then their 64 scales (fp8_heads.cu).
    """
    return (pages, num_kv_heads, PAGE * (dim + 1)) if fp8 else (pages, num_kv_heads, PAGE, dim)


@dataclass(frozen=True)
class DeviceRopeTables:
    """RoPE tables (`rope_tables.RopeTables`) on the device.

    The result is `x[j] * own[position, j] + x[partner[j]] * other[position, j]`, the same for all heads. own, other
    [positions, head_dim] float32; partner [head_dim] int32.
    """

    own: Array
    other: Array
    partner: Array


@dataclass(frozen=True)
class PagedTokens:
    """The new tokens of a layer, and the paged cache that they go to.

    query [num_tokens, num_heads, query_dim], key, value [num_tokens, num_kv_heads, dim]: before RoPE; a sink stands
    behind the numbers of its head. keys, values [pages, num_kv_heads, 64, dim]; of fp8 as `page_shape` says. rows
    (int32): the row of each token, or -1. positions: of each token. pages [rows, pages_per_row] int32: the page table.
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
        """Return the arguments that both kernels begin with; out: what they write besides the cache."""
        tables = self.tables
        given = self.query, self.key, self.value, out, self.keys, self.values, tables.own, tables.other, tables.partner
        return *given, self.rows, self.positions, self.pages, self.pages.shape[1]


@dataclass(frozen=True)
class AttentionKernelSpec:
    """What an attention kernel is compiled for.

    dtype: of the cache, and of all but queries and keys, whose dtype is `given`; both by NumPy's names. wide: positions
    are int64. window: the number of tokens that a token sees, itself among them; 0: all before it. sinks: whether each
    head has a logit beside its scores, behind its numbers of a query. fp8: the cache has e4m3 numbers, `dtype` all
    else.
    """

    dtype: str
    given: str
    wide: bool
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int
    sinks: bool = False
    fp8: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        values = {
            "KIND": NUMBERS[self.dtype],
            "GIVEN": NUMBERS[self.given],
            "WIDE": int(self.wide),
            "KV_HEADS": self.kv_heads,
            "GROUP": self.heads // self.kv_heads,
            "HEADS": self.block_heads,
            "DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "WINDOW": self.window,
            "SINKS": int(self.sinks),
            "FP8": int(self.fp8),
            "PAGE": PAGE,
            "THREADS": THREADS,
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())

    @property
    def block_heads(self) -> int:
        """Return a block's query heads: 8 columns of a product, or 4 beyond 128 numbers, for the registers."""
        return min(self.heads // self.kv_heads, 4 if self.head_dim > 128 else 8)

    @property
    def blocks(self) -> int:
        """Return the blocks of a request and share: KV heads times the chunks of their query heads."""
        return self.kv_heads * -(-self.heads // self.kv_heads // self.block_heads)

    def shares(self, requests: int, multiprocessors: int) -> int:
        """Return how many blocks share a row's splits: a power of two, up to eight blocks a multiprocessor in all."""
        shares = 1
        while shares < SPLITS and 2 * shares * requests * self.blocks <= 8 * multiprocessors:
            shares *= 2
        return shares
