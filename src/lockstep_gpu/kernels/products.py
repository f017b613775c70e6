"""GEMMs of activations and weights on a device, and the LoRA terms that adapters add.

Weights of 16 bits go through `gemm.Gemm`, float32 through float32_products.cu, e4m3 through `fp8_gemm.Fp8Gemm`. Up to
32 rows of fp16 are multiplied with an integer weight by a kernel that reads it as it is stored (small_weights.cu),
16 rows at a time; any number of rows of bf16 by that of experts (expert_small_weights.cu), with the same bits in any
company. For more rows of fp16, and for shapes that the kernels don't support, the weight is dequantized to 16 bits and
multiplied by `Gemm`; all weights share the memory for that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep_gpu import cuda
from lockstep_gpu.kernels.expert_products import TILES, Tile
from lockstep_gpu.kernels.fp8_gemm import Fp8Gemm, QuantizedRows
from lockstep_gpu.kernels.gemm import ALIGNED, MAX_OUTPUTS, Gemm, output_arguments, padded, size_for
from lockstep_gpu.kernels.library import including, kind_options

_KERNEL_ROWS = (8, 16)  # the kernel is compiled for up to this many rows
MAX_KERNEL_ROWS = 32  # with more, dequantizing the weight and reading it again is faster
_WIDE_OUTPUTS = (8192, 16384)  # out_features from which a GEMM is wide, and very wide
# By bits and rows of the kernel: outputs and warps of a block, for a GEMM that is not wide, wide and very wide.
_BLOCKS = {
    (8, 8): ((16, 16), (32, 8), (32, 8)),
    (8, 16): ((32, 16), (16, 4), (64, 4)),
    (4, 8): ((32, 16), (64, 8), (64, 8)),
    (4, 16): ((32, 16), (32, 4), (64, 4)),
}
_BF16_COLUMNS = 32  # that the kernel of bf16 takes at once, all of one group
_DEQUANTIZE_THREADS = 256
_EXPAND_THREADS = 256  # as in lora_expand.cu
_ROWS_TOGETHER = 8  # rows of a block if there are at least _MANY_ROWS: neighbours mostly have the same adapter
_MANY_ROWS = 64
Multiplier = Callable[[int], None]  # enqueues the GEMMs of bound arrays, for a number of rows


@dataclass(frozen=True)
class StridedView:
    """The rows of a value: an array that starts at its first element, and the elements from one row to the next."""

    array: cuda.Array
    stride: int

    @classmethod
    def of(cls, array: cuda.Array) -> StridedView:
        return cls(array, math.prod(array.shape[1:]))


@dataclass(frozen=True)
class Adapters:
    """The adapter of each row of a GEMM.

    Attributes:
        ids: Integers [tokens]: each token's adapter slot, or -1.
        rows: The token of each row; None: row i is token i.
        rank: The LoRA rank of all adapters.
    """

    ids: cuda.Array
    rows: cuda.Array | None
    rank: int


@dataclass(frozen=True)
class SmallWeight:
    """Concatenated weights [out_features[i], in_features], quantized or of 16 bits.

    Attributes:
        data: uint8 [sum of out_features, in_features * bits / 8], or floats if bits is 16: the activations' dtype, or
            float32, whose outputs are float32.
        scales: fp16 [sum of out_features, num_groups], times `SCALES_TIMES`; None for floats.
        group_size: 0 with 8 bits: data is e4m3, scales float32 [sum of out_features].
    """

    data: cuda.Array
    scales: cuda.Array | None
    bits: int
    group_size: int
    in_features: int
    out_features: tuple[int, ...]

    @property
    def fits_kernel(self) -> bool:
        """Return whether each aligned 16 bytes of a quantized row belong to one group."""
        columns = 128 // self.bits
        is_aligned = self.group_size % columns == 0 and self.in_features % columns == 0
        return is_aligned and len(self.out_features) <= MAX_OUTPUTS


class Products:
    """GEMMs on one stream, and the scratch memory that they share, because they run one after another."""

    def __init__(self, stream: cuda.Stream, dtype: np.dtype):
        """Compile the kernels; dtype: of activations, fp16 or bf16."""
        self._stream = stream
        self._dtype = dtype
        self._options = kind_options(dtype.name)
        self._small = functools.cache(lambda: cuda.compile_kernels(including("small_weights.cu"), self._options))
        self._gemm = functools.cache(lambda: Gemm(stream, dtype))  # not of float32
        self._fp8 = functools.cache(lambda: Fp8Gemm(stream, dtype))  # not every GPU supports it
        # Buffers for a dequantized weight: the last is the largest; captured graphs may use the others.
        self._scratch = [cuda.empty((1,), dtype)]
        self._scratch_size = 1  # of the largest weight that is bound

    def bind(
        self, weight: SmallWeight, x: cuda.Array, outs: Sequence[cuda.Array], quantized: QuantizedRows | None = None
    ) -> Multiplier:
        """Return a call that computes outs[i] = x @ weight[i].T for a number of rows.

        A captured graph of the call is valid as long as the call and these `Products` live.

        Args:
            x: [..., in_features].
            outs: Each [..., out_features[i]].
            quantized: `x` as e4m3, if a kernel has quantized it already.
        """
        if weight.data.dtype.name == "float32":
            return self._tiled(weight, x, outs)
        if weight.bits == 16:
            return self._gemm().bind(weight.data, x, outs)
        if not weight.group_size:
            assert weight.scales is not None  # quantised
            return self._fp8().bind(weight.data, weight.scales, x, outs, quantized)
        is_bf16 = self._dtype.name == "bfloat16"
        is_aligned = not any(size % ALIGNED for size in weight.out_features)
        if is_bf16 and is_aligned and weight.group_size % _BF16_COLUMNS == 0:
            return self._tiled(weight, x, outs)
        self._scratch_size = max(self._scratch_size, sum(weight.out_features) * weight.in_features)
        kernel_rows = 0
        if weight.fits_kernel and not is_bf16:
            kernel_rows = MAX_KERNEL_ROWS
        kernel_launch = functools.cache(functools.partial(self._kernel_launch, weight, x, outs))
        # At its first call: by then all weights are bound, so the scratch memory has its final size.
        dequantized = functools.cache(functools.partial(self._dequantized, weight, x, outs))
        step = _KERNEL_ROWS[-1]

        def multiply(rows: int) -> None:
            if rows > kernel_rows:
                dequantized()(rows)
                return
            for first in range(0, rows, step):
                count = min(rows - first, step)
                launch, blocks = kernel_launch(first, size_for(count, _KERNEL_ROWS))
                launch(blocks, count)

        return multiply

    def _kernel_launch(
        self, weight: SmallWeight, x: cuda.Array, outs: Sequence[cuda.Array], first: int, max_rows: int
    ) -> tuple[cuda.Launch, int]:
        """Return a launch of the kernel, and its blocks, for up to `max_rows` rows from row `first` on."""
        assert weight.scales is not None  # quantized
        total = sum(weight.out_features)
        outputs, warps = _BLOCKS[weight.bits, max_rows][sum(total >= width for width in _WIDE_OUTPUTS)]
        out_arguments = output_arguments([out[first:] for out in outs])
        kernel = self._small()[f"gemv_{weight.bits}_{outputs}_{warps}_{max_rows}"]
        arguments: tuple[cuda.Array | int, ...] = (
            weight.data, weight.scales, x[first:], *out_arguments, total, weight.in_features, weight.group_size,
            max_rows,
        )  # fmt: skip
        return cuda.Launch(kernel, self._stream, 32 * warps, *arguments, overlaps=True), -(-total // outputs)

    def _tiled(self, weight: SmallWeight, x: cuda.Array, outs: Sequence[cuda.Array]) -> Multiplier:
        """Return a call of the kernels of experts, for rows of bf16 with integers or any rows with float32 weights."""
        is_float32 = weight.scales is None
        if is_float32:
            file = "float32_products.cu"
            prefix = "float32"
        else:
            file = "expert_small_weights.cu"
            prefix = f"dense_{weight.bits}"
        module = cuda.compile_kernels(including(file), kind_options(x.dtype.name))
        ends = [0, *itertools.accumulate(weight.out_features)]

        @functools.cache
        def launches(tile: Tile) -> list[tuple[cuda.Launch, int]]:
            nbytes = 0  # the kernels of float32 declare their shared memory
            if not is_float32:
                nbytes = tile.shared(weight.bits)
            calls = []
            for low, high, out in zip(ends, ends[1:], outs):
                blocks = -(-(high - low) // tile.outputs)
                sizes = high - low, weight.in_features
                arguments: tuple[cuda.Array | int, ...] = (weight.data[low:high], x, out, *sizes, blocks, 0)
                if weight.scales is not None:
                    scales = weight.scales[low:high]
                    arguments = (weight.data[low:high], scales, x, out, *sizes, weight.group_size, blocks, 0)
                kernel = module[f"{prefix}_{tile.rows}"]
                launch = cuda.Launch(kernel, self._stream, tile.threads, *arguments, overlaps=True, shared=nbytes)
                calls.append((launch, blocks))
            return calls

        def multiply(rows: int) -> None:
            tile = next((tile for tile in TILES[:2] if rows <= tile.rows), TILES[2])  # all have the same bits
            for launch, blocks in launches(tile):
                launch(blocks * -(-rows // tile.rows), rows)

        return multiply

    def _dequantized(self, weight: SmallWeight, x: cuda.Array, outs: Sequence[cuda.Array]) -> Multiplier:
        """Return a call that dequantizes a weight to 16 bits and multiplies with it."""
        assert weight.scales is not None  # quantized
        total = sum(weight.out_features)
        dequantized_weight = self._scratch_memory().reshape(total, weight.in_features)
        product = self._gemm().bind(dequantized_weight, x, outs)
        kernel = self._small()[f"dequantize_{weight.bits}"]
        arguments = weight.data, weight.scales, dequantized_weight, weight.in_features, weight.group_size, total
        dequantize = cuda.Launch(kernel, self._stream, _DEQUANTIZE_THREADS, *arguments)
        blocks = -(-total * weight.in_features // 8 // _DEQUANTIZE_THREADS)

        def multiply(rows: int) -> None:
            dequantize(blocks)
            product(rows)

        return multiply

    def expand(
        self,
        base: StridedView,
        shrunk: StridedView,
        adapters: Adapters,
        matrices: Sequence[cuda.Array | None],
        outs: Sequence[cuda.Array],
    ) -> Callable[[int], None]:
        """Return a call that adds each row's LoRA term to the base GEMMs, for a number of rows.

        Args:
            base: The concatenated results of the base GEMMs.
            shrunk: The concatenated products of the input with A of all resident adapters, one for each B.
            matrices: B of each GEMM, [columns, out_features], or None.
            outs: outs[i] becomes the result i of `base` plus its LoRA term.
        """
        module = cuda.compile_kernels(including("lora_expand.cu"), self._options)
        calls = list[tuple[dict[int, cuda.Launch], int]]()
        starts = [0, *itertools.accumulate(out.shape[1] for out in outs)]  # of each output in a row of `base`
        columns = list[int]()  # where the product with A of each output starts in `shrunk`; -1: it has none
        shrunk_width = 0
        for b in matrices:
            if b is None:
                columns.append(-1)
            else:
                columns.append(shrunk_width)
                shrunk_width += b.shape[0]
        any_b = next(b for b in matrices if b is not None)  # a placeholder for missing ones
        ids = adapters.ids
        id_arguments: list[cuda.Array | int] = [ids, int(ids.dtype.itemsize == 8)]
        if adapters.rows is None:
            id_arguments += [ids, -1]
        else:
            id_arguments += [adapters.rows, int(adapters.rows.dtype.itemsize == 8)]
        for first in range(0, len(outs), MAX_OUTPUTS):
            some = slice(first, first + MAX_OUTPUTS)
            ends = [start - starts[first] for start in starts[1:][some]]
            total = ends[-1]
            base_array = base.array.reshape(math.prod(base.array.shape))[starts[first] :]
            arguments: tuple[cuda.Array | int, ...] = (
                base_array, base.stride, shrunk.array, shrunk.stride, *id_arguments,
                *padded([b or any_b for b in matrices[some]], any_b), *padded(outs[some], outs[first]),
                *padded(ends, total)[: MAX_OUTPUTS - 1], total, *padded(columns[some], -1), adapters.rank, 0,
            )  # fmt: skip
            wide = 1  # elements that a thread reads at once
            if all(size % 8 == 0 for size in (*ends, base.stride, starts[first])):
                wide = 8
            blocks = -(-total // wide // _EXPAND_THREADS)
            launches = {}
            for rows_together in (1, _ROWS_TOGETHER):
                kernel = module[f"lora_expand_{wide}_{rows_together}"]
                launches[rows_together] = cuda.Launch(kernel, self._stream, _EXPAND_THREADS, *arguments, overlaps=True)
            calls.append((launches, blocks))

        def run(rows: int) -> None:
            count = 1
            if rows >= _MANY_ROWS:
                count = _ROWS_TOGETHER
            for launches, blocks in calls:
                launches[count](-(-rows // count) * blocks, rows)

        return run

    def _scratch_memory(self) -> cuda.Array:
        """Return memory for the largest bound weight in 16 bits."""
        if math.prod(self._scratch[-1].shape) < self._scratch_size:
            self._scratch.append(cuda.empty((self._scratch_size,), self._dtype, "a weight in 16 bits"))
        return self._scratch[-1]
