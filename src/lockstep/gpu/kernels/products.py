"""Products of activations with weights on a device, and what adapters add to them.

They stand between the kernels of a block. Products with fp16 weights are `gemm.Gemm`'s. Up to 32 rows are multiplied
with a quantised weight by a kernel that reads it as it is stored (small_weights.cu), 16 at a time; more, and weights of
shapes that the kernel does not take, by `Gemm` too, made fp16 before, in memory that all of them share. Products of
e4m3 numbers are `fp8_gemm.Fp8Gemm`'s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.gpu import cuda
from lockstep.gpu.kernels.fp8_gemm import Fp8Gemm, Rows
from lockstep.gpu.kernels.gemm import MOST_OUTPUTS, Gemm, output_arguments
from lockstep.gpu.kernels.row_kernels import COMMON, PRELUDE

SOURCE = COMMON + Path(__file__).with_name("small_weights.cu").read_text(encoding="utf-8")
LORA_SOURCE = PRELUDE + Path(__file__).with_name("lora_expand.cu").read_text(encoding="utf-8")
_ROWS = (8, 16)  # of a launch of the kernel, at most: each number has its own
MOST_ROWS = 32  # up to which launches of the kernel are sooner done than a weight is made fp16 and read again
_WIDTHS = (8192, 16384)  # out_features from which a product is wide, and very wide
# The kernel's form for a product that is not wide, wide and very wide, by bits and most rows: outputs and warps of a
# block.
_FORMS = {
    (8, 8): ((16, 16), (32, 8), (32, 8)),
    (8, 16): ((32, 16), (16, 4), (64, 4)),
    (4, 8): ((32, 16), (64, 8), (64, 8)),
    (4, 16): ((32, 16), (32, 4), (64, 4)),
}
_DEQUANTIZE_THREADS = 256
# Of what adapters add: threads as in lora_expand.cu; rows from which a block makes several, mostly of one adapter.
_EXPAND_THREADS = 256
_ROWS_TOGETHER = 8
_MANY_ROWS = 64


# Of so many rows: put the products of arrays that are bound on the stream.
Multiplier = Callable[[int], None]


@dataclass(frozen=True)
class StridedView:
    """The rows of a value, [rows, ...] or all behind its first number, and the numbers from one to the next."""

    array: cuda.Array
    stride: int

    @classmethod
    def of(cls, array: cuda.Array) -> StridedView:
        return cls(array, math.prod(array.shape[1:]))


@dataclass(frozen=True)
class Adapters:
    """Which adapter each row of a product has.

    ids: integers [tokens], each token's adapter slot, -1 for none. rows: which of them a row of a
    product has; None: in order. rank: numbers of each adapter between its two products.
    """

    ids: cuda.Array
    rows: cuda.Array | None
    rank: int


@dataclass(frozen=True)
class SmallWeight:
    """Weights [out_features[i], in_features] one behind the other, quantised or fp16.

    data: uint8 [sum of out_features, in_features * bits / 8], or fp16 at 16 bits. scales: fp16 [sum of out_features,
    num_groups], `SCALES_TIMES` as large (row_kernels.py); None at 16 bits. With a group size of 0 at 8 bits data is
    e4m3 numbers, scales float32 [sum of out_features].
    """

    data: cuda.Array
    scales: cuda.Array | None
    bits: int
    group_size: int
    in_features: int
    out_features: tuple[int, ...]

    @property
    def fits_kernel(self) -> bool:
        """Return whether 16 bytes of a quantised row are of one group, and start where 16 bytes do."""
        columns = 128 // self.bits
        whole = self.group_size % columns == 0 and self.in_features % columns == 0
        return whole and len(self.out_features) <= MOST_OUTPUTS


class Products:
    """The kernels and cuBLAS on one stream, on which calls follow each other, and the memory that they share."""

    def __init__(self, stream: cuda.Stream):
        self._stream = stream
        self._module = cuda.compile_kernels(SOURCE)
        self._gemm = Gemm(stream)
        self._fp8 = functools.cache(lambda: Fp8Gemm(stream))  # which not every GPU has
        # For a weight as fp16: the last is as large as any that is bound; captured graphs may use those before.
        self._scratch = [cuda.empty((1,), "f2")]
        self._largest = 1

    def bind(
        self, weight: SmallWeight, x: cuda.Array, outs: Sequence[cuda.Array], rows: Rows | None = None
    ) -> Multiplier:
        """Return a call that multiplies rows of `x` with weights.

        outs[i] [..., out_features[i]] = x [..., in_features] times weight i, transposed, of as many rows as a call is
        given. Captured graphs of it are valid as long as it lives, and these `Products`. rows: `x` as e4m3 where it is
        made already.
        """
        if weight.bits == 16:
            return self._gemm.bind(weight.data, x, outs)
        if not weight.group_size:
            assert weight.scales is not None  # quantised
            return self._fp8().bind(weight.data, weight.scales, x, outs, rows)
        self._largest = max(self._largest, sum(weight.out_features) * weight.in_features)
        few = MOST_ROWS if weight.fits_kernel else 0
        by_kernel = functools.cache(functools.partial(self._few, weight, x, outs))
        by_cublas = list[Multiplier]()
        size = _ROWS[-1]

        def multiply(rows: int) -> None:
            if rows > few:
                if not by_cublas:
                    by_cublas.append(self._many(weight, x, outs))
                return by_cublas[0](rows)
            for first in range(0, rows, size):
                count = min(rows - first, size)
                launch, blocks = by_kernel(first, next(most for most in _ROWS if count <= most))
                launch(blocks, count)

        return multiply

    def _few(
        self, weight: SmallWeight, x: cuda.Array, outs: Sequence[cuda.Array], first: int, most: int
    ) -> tuple[cuda.Launch, int]:
        """Return a launch of the kernel, and its blocks, for at most `most` rows from `first` on."""
        assert weight.scales is not None  # quantised
        total = sum(weight.out_features)
        outputs, warps = _FORMS[weight.bits, most][sum(total >= width for width in _WIDTHS)]
        to = output_arguments([out[first:] for out in outs])
        sizes = total, weight.in_features, weight.group_size
        kernel = self._module[f"gemv_{weight.bits}_{outputs}_{warps}_{most}"]
        given: tuple[cuda.Array | int, ...]
        given = weight.data, weight.scales, x[first:], *to, *sizes, most
        return cuda.Launch(kernel, self._stream, 32 * warps, *given, overlaps=True), -(-total // outputs)

    def _many(self, weight: SmallWeight, x: cuda.Array, outs: Sequence[cuda.Array]) -> Multiplier:
        """Return a call of cuBLAS, made with the first call: all products that share the memory are bound then."""
        assert weight.scales is not None  # quantised
        total = sum(weight.out_features)
        whole = self._room().reshape(total, weight.in_features)
        product = self._gemm.bind(whole, x, outs)
        kernel = self._module[f"dequantize_{weight.bits}"]
        made = weight.data, weight.scales, whole, weight.in_features, weight.group_size, total
        dequantize = cuda.Launch(kernel, self._stream, _DEQUANTIZE_THREADS, *made)
        blocks = -(-total * weight.in_features // 8 // _DEQUANTIZE_THREADS)

        def multiply(rows: int) -> None:
            dequantize(blocks)
            product(rows)

        return multiply

    def expand(
        self,
        made: StridedView,
        shrunk: StridedView,
        adapters: Adapters,
        matrices: Sequence[cuda.Array | None],
        outs: Sequence[cuda.Array],
    ) -> Callable[[int], None]:
        """Return a call that adds what a row's adapter adds to the products `made`.

        outs[i] = product i of `made`, where they lie one behind the other, and what the adapter adds. shrunk: the input
        times A of all resident adapters, for each product whose B is in `matrices` [columns, out_features], one behind
        the other. The call is given the number of rows.
        """
        module = cuda.compile_kernels(LORA_SOURCE)
        calls = list[tuple[dict[int, cuda.Launch], int]]()
        starts = [0]
        columns = list[int]()
        at = 0
        for b, out in zip(matrices, outs, strict=True):
            starts.append(starts[-1] + out.shape[1])
            columns.append(-1 if b is None else at)
            at += 0 if b is None else b.shape[0]
        some = next(b for b in matrices if b is not None)
        ids = adapters.ids
        of_rows = adapters.rows
        whose = ids, int(ids.dtype.itemsize == 8), of_rows or ids, int(of_rows.dtype.itemsize == 8) if of_rows else -1
        for first in range(0, len(outs), MOST_OUTPUTS):
            few = slice(first, first + MOST_OUTPUTS)
            fill = MOST_OUTPUTS - len(outs[few])
            bs = [some if b is None else b for b in matrices[few]] + [some] * fill
            to = [*outs[few], *[outs[first]] * fill]
            of = [*columns[few], *[-1] * fill]
            ends = [end - starts[first] for end in starts[first + 1 : first + 1 + len(outs[few])]]
            total = ends[-1]
            ends = (ends + [total] * fill)[: MOST_OUTPUTS - 1]
            own = made.array.reshape(math.prod(made.array.shape))[starts[first] :]
            given: tuple[cuda.Array | int, ...]
            given = own, made.stride, shrunk.array, shrunk.stride, *whose, *bs, *to, *ends, total, *of, adapters.rank
            wide = 8 if all(size % 8 == 0 for size in (*ends, total, made.stride, starts[first])) else 1
            blocks = -(-total // wide // _EXPAND_THREADS)
            launches = {
                count: cuda.Launch(
                    module[f"lora_expand_{wide}_{count}"], self._stream, _EXPAND_THREADS, *given, 0, overlaps=True
                )
                for count in (1, _ROWS_TOGETHER)
            }
            calls.append((launches, blocks))

        def run(rows: int) -> None:
            count = _ROWS_TOGETHER if rows >= _MANY_ROWS else 1
            for launches, blocks in calls:
                launches[count](-(-rows // count) * blocks, rows)

        return run

    def _room(self) -> cuda.Array:
        """Return memory for the largest weight as fp16; asked with the first call, when all products are bound."""
        if math.prod(self._scratch[-1].shape) < self._largest:
            self._scratch.append(cuda.empty((self._largest,), "f2", "a weight as fp16"))
        return self._scratch[-1]
