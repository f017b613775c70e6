"""Batch-invariant GEMM of fp16 or bf16: its bits don't depend on the number of rows.

Each output accumulates the columns in order, 16 at a time, in fp32: by our kernel (few_rows.cu) up to 16 rows, or up to
64 where it is faster, and by cuBLASLt beyond. On Hopper both give the same bits. To make that hold on any GPU, each
algorithm of cuBLAS is compared with the kernel before its first use, once per shape: all of them with 16 rows, those
that are used also with the most rows that they are used for. Of the algorithms with the same bits the fastest on this
GPU that runs is used: the choice changes no result. Where none runs, and for narrow weights, the kernel takes all rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lockstep.errors import CheckError
from lockstep_gpu import cuda
from lockstep_gpu.kernels.cublas_lt import Algorithm, CublasLt
from lockstep_gpu.kernels.library import including, kind_options

# As in few_rows.cuh.
OUTPUTS = 32
_THREADS = 128
_STAGES = 4
_STAGE = 512  # bytes of a row in a stage
MAX_OUTPUTS = 3  # of a launch of the kernel
KERNEL_ROWS = (8, 16)  # the kernel is compiled for up to this many rows
_MORE_KERNEL_ROWS = (32, 64)  # and for these, where cuBLAS is slower, such as with a rank's shard of a weight
# An algorithm of cuBLAS is chosen for up to this many rows each; the last one also serves more.
CUBLAS_ROWS = (32, 64, 128, *range(256, 2049, 128))
MAX_TIMED_ROWS = 256  # up to which all algorithms are timed; beyond, the first _NUM_CANDIDATES that cuBLAS offers
_NUM_CANDIDATES = 6
_MARGIN = 1.03  # of algorithms within this factor of the fastest, take the one that cuBLAS offers first
_MAX_TRIAL_OUTPUTS = 1 << 27  # a GEMM with more, such as lm_head's, has no more than some rows in a pass
# Algorithms that cuBLAS offers for GEMMs of this many columns also run with more, though it doesn't offer them there.
_OFFERED_IN_FEATURES = (4096, 8192)
_MAX_NARROW_OUTPUTS = OUTPUTS  # up to this many the kernel alone is used: cuBLAS has few algorithms for one output
_L2_NBYTES = 128 << 20  # more than any GPU's L2 cache
_MAX_WEIGHTS = 4  # of a trial
ALIGNED = 8  # columns in 16 bytes
_TRIAL_ROWS = 64  # random rows of a trial, which repeat
T = TypeVar("T")


class Gemm:
    """Products of arrays of fp16 or bf16 (`dtype`) on a stream."""

    def __init__(self, stream: cuda.Stream, dtype: np.dtype):
        self._stream = stream
        self._shapes = _shapes(cuda.current_device(), dtype)

    def bind(self, weight: cuda.Array, x: cuda.Array, outs: Sequence[cuda.Array]) -> Callable[[int], None]:
        """Return a call that computes outs[i] = x @ weight[i].T for a number of rows.

        Args:
            weight: Concatenated weights, [sum of out_features, in_features].
            x: [..., in_features].
            outs: Each [..., out_features[i]].
        """
        calls = [self._bind(weight[rows], x, some) for rows, some in output_groups(outs)]

        def multiply(rows: int) -> None:
            for call in calls:
                call(rows)

        return multiply

    def _bind(self, weight: cuda.Array, x: cuda.Array, outs: Sequence[cuda.Array]) -> Callable[[int], None]:
        """As `bind`, of up to MAX_OUTPUTS outputs."""
        shapes = self._shapes
        depth = weight.shape[1]
        part_sizes = tuple(out.shape[-1] for out in outs)
        by_cublas = shapes.by_cublas(self._stream, weight, x, outs)
        kernel_launch = functools.cache(functools.partial(shapes.launch, self._stream, weight, x, outs))

        @functools.cache
        def kernel_agrees() -> bool:
            return all(shapes[size, depth].kernel_agrees for size in part_sizes)

        def multiply(rows: int) -> None:
            if kernel_agrees() and (rows <= KERNEL_ROWS[-1] or rows <= shapes.kernel_rows(part_sizes, depth)):
                kernel_launch(size_for(rows, (*KERNEL_ROWS, *_MORE_KERNEL_ROWS)))(rows)
            else:
                by_cublas(rows)

        return multiply


def output_groups(outs: Sequence[cuda.Array], size: int = MAX_OUTPUTS) -> Iterator[tuple[slice, Sequence[cuda.Array]]]:
    """Yield the outputs of each launch, and the rows of the concatenated weights that they are of."""
    start = 0
    for first in range(0, len(outs), size):
        some = outs[first : first + size]
        end = start + sum(out.shape[-1] for out in some)
        yield slice(start, end), some
        start = end


def padded(values: Sequence[T], filler: T) -> list[T]:
    """Return MAX_OUTPUTS values: kernels take that many outputs, and ignore the last ones."""
    return [*values, *[filler] * (MAX_OUTPUTS - len(values))]


def output_arguments(outs: Sequence[cuda.Array]) -> list[cuda.Array | int]:
    """Return a kernel's output arguments: MAX_OUTPUTS arrays, and where all but the last end."""
    ends = [*itertools.accumulate(out.shape[-1] for out in outs)]
    return [*padded(outs, outs[-1]), *padded(ends, ends[-1])[: MAX_OUTPUTS - 1]]


def few_rows_launch(
    kernel: cuda.Kernel, stream: cuda.Stream, max_rows: int, *arguments: cuda.Array | int
) -> cuda.Launch:
    """Return a launch of a kernel for up to `max_rows` rows."""
    shared = _STAGES * (OUTPUTS + max_rows) * _STAGE
    return cuda.Launch(kernel, stream, _THREADS, *arguments, overlaps=True, shared=shared)


def size_for(rows: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending sizes that is at least `rows`, else the largest."""
    return next((size for size in sizes if rows <= size), sizes[-1])


@functools.cache
def _shapes(device: int, dtype: np.dtype) -> _Shapes:
    return _Shapes(dtype)


@dataclass(frozen=True)
class _Shape:
    """How to multiply with weights of a shape.

    kernel_agrees: the kernel has the bits of all `algorithms`. algorithms: the best first, by their most rows.
    """

    kernel_agrees: bool
    algorithms: Mapping[int, Sequence[Algorithm]]


class _Shapes:
    """How to multiply with weights of each shape, [out_features, in_features], on a device: chosen once per shape."""

    def __init__(self, dtype: np.dtype) -> None:
        self.library = CublasLt(dtype)
        self._dtype = dtype
        self._module = cuda.compile_kernels(including("few_rows.cu"), kind_options(dtype.name))
        self._chosen: dict[tuple[int, int], _Shape] = {}
        self._max_rows: dict[tuple[int, int], int] = {}  # by shape: rows of the largest array that is bound
        self._kernel_rows: dict[tuple[tuple[int, ...], int], int] = {}

    def __getitem__(self, shape: tuple[int, int]) -> _Shape:
        if shape not in self._chosen:
            self._chosen[shape] = self._choose(*shape)
        return self._chosen[shape]

    def launch(
        self, stream: cuda.Stream, weight: cuda.Array, x: cuda.Array, outs: Sequence[cuda.Array], max_rows: int
    ) -> Callable[[int], None]:
        """Return a launch of the kernel, by number of rows; up to `max_rows` share each block of outputs."""
        arguments: tuple[cuda.Array | int, ...] = (weight, x, *output_arguments(outs), *weight.shape, max_rows)
        few_rows = few_rows_launch(self._module[f"few_rows_{max_rows}"], stream, max_rows, *arguments)
        many_rows = few_rows_launch(self._module["many_rows"], stream, KERNEL_ROWS[-1], *arguments)
        blocks = -(-weight.shape[0] // OUTPUTS)

        def run(rows: int) -> None:
            if rows <= max_rows:
                few_rows(blocks, rows)
            else:
                many_rows(blocks * -(-rows // KERNEL_ROWS[-1]), rows)

        return run

    def by_cublas(
        self, stream: cuda.Stream, weight: cuda.Array, x: cuda.Array, outs: Sequence[cuda.Array]
    ) -> Callable[[int], None]:
        """Return a product of each output by cuBLAS, by number of rows; by the kernel where cuBLAS has none."""
        calls = [self._part_by_cublas(stream, weight[rows], x, out) for rows, (out,) in output_groups(outs, 1)]

        def multiply(rows: int) -> None:
            for call in calls:
                call(rows)

        return multiply

    def _part_by_cublas(
        self, stream: cuda.Stream, weight: cuda.Array, x: cuda.Array, out: cuda.Array
    ) -> Callable[[int], None]:
        out_features, in_features = weight.shape
        max_rows = math.prod(x.shape[:-1])
        self._max_rows[out_features, in_features] = max(max_rows, self._max_rows.get((out_features, in_features), 0))
        call = self.library.bind(stream, weight, x, out)
        kernel_launch = functools.cache(functools.partial(self.launch, stream, weight, x, [out], KERNEL_ROWS[-1]))

        def multiply(rows: int) -> None:
            shape = self[out_features, in_features]
            if shape.algorithms:
                try:
                    call(rows, shape.algorithms[size_for(rows, CUBLAS_ROWS)])
                    return
                except CheckError:
                    if not shape.kernel_agrees:
                        raise
            kernel_launch()(rows)

        return multiply

    def kernel_rows(self, part_sizes: tuple[int, ...], in_features: int) -> int:
        """Return the rows up to which the kernel is faster than cuBLAS; part_sizes: out_features of each weight."""
        key = part_sizes, in_features
        if key not in self._kernel_rows:
            self._kernel_rows[key] = self._time_kernel(part_sizes, in_features)
        return self._kernel_rows[key]

    def _time_kernel(self, part_sizes: Sequence[int], in_features: int) -> int:
        trial = Trial(sum(part_sizes), in_features, _MORE_KERNEL_ROWS[-1], self._dtype, self._dtype)
        kernel_rows = KERNEL_ROWS[-1]
        outs = [cuda.empty((_MORE_KERNEL_ROWS[-1], size), self._dtype, "trying products out") for size in part_sizes]
        for rows in _MORE_KERNEL_ROWS:
            by_kernel = list[Callable[[], None]]()
            by_cublas = list[Callable[[], None]]()
            for weight in trial.weights:
                try:
                    launch = self.launch(trial.stream, weight, trial.x, outs, rows)
                except CheckError:  # more shared memory than this GPU has
                    return kernel_rows
                by_kernel.append(functools.partial(launch, rows))
                by_cublas.append(functools.partial(self.by_cublas(trial.stream, weight, trial.x, outs), rows))
            if trial.ranked({"kernel": by_kernel, "cublas": by_cublas})[0] == "cublas":
                break
            kernel_rows = rows
        return kernel_rows

    def _choose(self, out_features: int, in_features: int) -> _Shape:
        has_kernel = in_features % ALIGNED == 0
        if has_kernel and out_features <= _MAX_NARROW_OUTPUTS:
            return _Shape(True, {})
        rows = CUBLAS_ROWS[-1] if CUBLAS_ROWS[-1] * out_features <= _MAX_TRIAL_OUTPUTS else MAX_TIMED_ROWS
        max_rows = min(self._max_rows.get((out_features, in_features), 0), _MAX_TRIAL_OUTPUTS // out_features)
        rows = max(rows, max_rows // _TRIAL_ROWS * _TRIAL_ROWS)
        trial = Trial(out_features, in_features, rows, self._dtype, self._dtype)
        calls = [self.library.bind(trial.stream, weight, trial.x, trial.out) for weight in trial.weights]
        offered = {size: list(self._offered(out_features, in_features, size)) for size in CUBLAS_ROWS}
        bits_of = dict[Algorithm, bytes]()
        for algorithm in dict.fromkeys(itertools.chain.from_iterable(offered.values())):
            with contextlib.suppress(CheckError):  # an algorithm of a shorter GEMM may not run
                bits_of[algorithm] = trial.bits(functools.partial(calls[0], KERNEL_ROWS[-1], [algorithm]))
        if not bits_of and has_kernel:
            return _Shape(True, {})
        if not bits_of:
            raise CheckError(
                f"cuBLAS: expected a product [{out_features}, {in_features}] of {self._dtype} whose columns are not "
                "split, found none; install another cuBLAS"
            )
        # Keep the algorithms with the kernel's bits, or else those with the bits of the first algorithm.
        reference, expected = next(iter(bits_of.items()))
        kernel_agrees = False
        if has_kernel:
            launch = self.launch(trial.stream, trial.weights[0], trial.x, [trial.out], KERNEL_ROWS[-1])
            kernel_bits = trial.bits(functools.partial(launch, KERNEL_ROWS[-1]))
            kernel_agrees = kernel_bits in bits_of.values()
            if kernel_agrees:
                expected = kernel_bits
        equal = [algorithm for algorithm, bits in bits_of.items() if bits == expected]
        algorithms = dict[int, list[Algorithm]]()
        for size in CUBLAS_ROWS:
            if size <= MAX_TIMED_ROWS:
                candidates = equal
                margin = 1.0
            else:
                candidates = [algorithm for algorithm in offered[size] if algorithm in equal][:_NUM_CANDIDATES]
                margin = _MARGIN
            if size <= rows:  # else the trial's activations are too small to time them
                timed = {}
                for algorithm in candidates:
                    timed[algorithm] = [functools.partial(call, size, [algorithm]) for call in calls]
                candidates = trial.ranked(timed, margin)
            # The others follow: fewer rows than `size` may need one of them.
            algorithms[size] = list(dict.fromkeys([*candidates, *algorithms.get(MAX_TIMED_ROWS, equal)]))
        if kernel_agrees:
            launch(_TRIAL_ROWS)
        else:
            for first in range(0, _TRIAL_ROWS, KERNEL_ROWS[-1]):
                self.library.bind(trial.stream, trial.weights[0], trial.x[first:], trial.out[first:])(
                    KERNEL_ROWS[-1], [reference]
                )
        _drop_other_bits(trial, trial.rows(_TRIAL_ROWS), calls[0], algorithms, rows)
        return _Shape(kernel_agrees, algorithms)

    def _offered(self, out_features: int, in_features: int, rows: int) -> Iterator[Algorithm]:
        for depth in (in_features, *(depth for depth in _OFFERED_IN_FEATURES if depth < in_features)):
            yield from self.library.algorithms(out_features, depth, rows)


def _drop_other_bits(
    trial: Trial,
    expected: np.ndarray,
    call: Callable[[int, Sequence[Algorithm]], None],
    algorithms: Mapping[int, list[Algorithm]],
    rows: int,
) -> None:
    """Remove the algorithms that have other bits with the most rows that they are the best for.

    An algorithm may divide the columns of the last outputs only where there are many of them (stream-K).

    expected: [_TRIAL_ROWS, out_features], which repeat. algorithms: by their most rows; the largest serves `rows`.
    """
    tried = set[tuple[Algorithm, int]]()
    while True:
        most_rows = {}  # by algorithm: of ascending sizes the last one
        for size, candidates in algorithms.items():
            if candidates and size <= rows:
                most_rows[candidates[0]] = rows if size == CUBLAS_ROWS[-1] else size
        untried = most_rows.items() - tried
        if not untried:
            return
        for algorithm, count in untried:
            tried.add((algorithm, count))
            with contextlib.suppress(CheckError):  # it does not run for this many rows, but for fewer
                call(count, [algorithm])
                if not all(np.array_equal(block, expected[: len(block)]) for block in trial.blocks(count)):
                    for candidates in algorithms.values():
                        if algorithm in candidates:
                            candidates.remove(algorithm)


def trial_factors(columns: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return random rows of a weight and of activations, [_TRIAL_ROWS, columns] each.

    Of 16 bits, most products have another one in the row that cancels them, and the others are small. The sums are far
    smaller than the partial sums, so that another order of accumulation gives other bits even after rounding to 16
    bits, and with few columns.
    """
    random = np.random.default_rng(0)
    weight = random.standard_normal((_TRIAL_ROWS, columns), "f4")
    x = random.standard_normal((_TRIAL_ROWS, columns), "f4")
    if dtype.itemsize == 2:
        weight *= 16
        x *= 64
        order = random.permutation(columns)
        pairs = columns * 7 // 16
        weight[:, order[pairs : pairs * 2]] = weight[:, order[:pairs]]
        x[:, order[pairs : pairs * 2]] = -x[:, order[:pairs]]
        x[:, order[pairs * 2 :]] /= 8192
    return weight.astype(dtype), x.astype(dtype)


class Trial:
    """Random weights and rows of a shape, on a separate stream: a trial doesn't wait for other work."""

    def __init__(self, out_features: int, in_features: int, rows: int, dtype: np.dtype, out_dtype: np.dtype):
        self.stream = cuda.Stream()
        nbytes = out_features * in_features * dtype.itemsize
        purpose = "trying products out"
        # Timing cycles through several weights, so that each is read from memory and not from the L2 cache.
        copies = min(_MAX_WEIGHTS, -(-_L2_NBYTES // nbytes))
        self.weights = [cuda.empty((out_features, in_features), dtype, purpose) for _ in range(copies)]
        self.x = cuda.empty((rows, in_features), dtype, purpose)
        self.out = cuda.empty((rows, out_features), out_dtype, purpose)
        weight, x = trial_factors(in_features, dtype)
        self._host = weight, x  # the stream reads them later
        for array, host in ((self.weights[0], weight), (self.x, x)):
            first = array[:_TRIAL_ROWS]
            self.stream.upload(first, host[: first.shape[0]])
            for low in range(_TRIAL_ROWS, array.shape[0], _TRIAL_ROWS):
                self.stream.copy(array[low : low + _TRIAL_ROWS], first)

    def bits(self, multiply: Callable[[], None]) -> bytes:
        """Return the bits of the first rows of a product with the first weight."""
        multiply()
        return self.rows(KERNEL_ROWS[-1]).tobytes()

    def rows(self, count: int) -> np.ndarray:
        """Return the bits of the first rows of the last product, [count, out_features] integers."""
        host = np.empty((count, self.out.shape[1]), self.out.dtype)
        self.stream.download(host, self.out[:count])
        self.stream.synchronize()
        return host.view(f"u{host.itemsize}")

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """Yield the rows of the last product by blocks, which are alike: the activations repeat."""
        bits = self.rows(count)
        for first in range(0, count, _TRIAL_ROWS):
            yield bits[first : first + _TRIAL_ROWS]

    def ranked(self, calls: Mapping[T, Sequence[Callable[[], None]]], margin: float = 1.0) -> list[T]:
        """Return the keys of calls that run, the fastest first; those within a factor `margin` of it keep their order.

        calls: by key, a call for each of `weights`. One key alone is run, and not timed.
        """
        milliseconds = dict[T, float]()
        for key, weight_calls in calls.items():
            begin = cuda.Event()
            end = cuda.Event()
            with contextlib.suppress(CheckError):  # an algorithm may not run for all numbers of rows
                weight_calls[0]()
                if len(calls) == 1:
                    return [key]
                begin.record(self.stream)
                for call in (*weight_calls, *weight_calls):
                    call()
                end.record(self.stream)
                end.wait()
                milliseconds[key] = end.milliseconds_since(begin)
        limit = margin * min(milliseconds.values(), default=0.0)
        return sorted(milliseconds, key=lambda key: max(limit, milliseconds[key]))
