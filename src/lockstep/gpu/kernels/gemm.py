"""GEMM of fp16 rows and weights whose bits do not depend on the number of rows.

Each output is accumulated over the columns in order, 16 at a time, in fp32: by a kernel of our own (few_rows.cu) up to
16 rows, and up to 64 where it is faster, by cuBLASLt beyond. On Hopper both give the same bits; so that it holds on any
GPU, each algorithm of cuBLAS is compared with the kernel before it is used, once for a shape. As all that is left gives
the same bits, the fastest on this GPU may be taken: which one it is changes no result.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.kernels.cublas_lt import Algorithm, CublasLt
from lockstep.gpu.kernels.row_kernels import COMMON

FEW_ROWS = COMMON + Path(__file__).with_name("tensor_cores.cu").read_text(encoding="utf-8")
_SOURCE = FEW_ROWS + Path(__file__).with_name("few_rows.cu").read_text(encoding="utf-8")
# as in tensor_cores.cu; bytes of a row's stage
OUTPUTS = 32
_THREADS = 128
_STAGES = 4
_STAGE = 512
MOST_OUTPUTS = 3  # of a launch of the kernel
FEW = (8, 16)  # rows up to which a kernel takes them
_MORE = (32, 64)  # and up to which it does where cuBLAS is slower, such as of a rank's part of a weight
# And up to which one algorithm of cuBLAS does, the last one beyond: tiles of 128 rows fill a GPU well or badly.
MANY = (32, 64, 128, *range(256, 2049, 128))
TIMED = 256  # rows up to which all algorithms are timed
_FIRST = 6  # of those that cuBLAS offers for more rows, which are timed
_MARGIN = 1.03  # times the least: within it, the one that cuBLAS offers first
_MOST_NUMBERS = 1 << 27  # that a trial makes: products with more outputs are for a few rows of a pass
_DEPTHS = (4096, 8192)  # columns of shorter products, whose algorithms cuBLAS does not offer for longer ones
# bytes of weights that no GPU's L2 cache holds; copies of small ones at most
_CACHE = 128 << 20
_COPIES = 4
ALIGNED = 8  # columns of a row that start where 16 bytes do
_BLOCK = 64  # rows of random numbers, which repeat
_HALF = np.dtype(np.float16)
T = TypeVar("T")


class Gemm:
    """Products of fp16 arrays on a stream."""

    def __init__(self, stream: cuda.Stream):
        self._stream = stream
        self._shapes = _shapes(cuda.current_device())

    def bind(self, weight: cuda.Array, x: cuda.Array, outs: Sequence[cuda.Array]) -> Callable[[int], None]:
        """Return a call that multiplies so many rows of `x` with weights that lie one behind the other.

        outs[i] [..., out_features[i]] = x [..., in_features] times weight i, transposed. weight [sum of out_features,
        in_features].
        """
        shapes, (total, depth) = self._shapes, weight.shape
        ends = list(itertools.accumulate(out.shape[-1] for out in outs))
        parts = [weight[low:high] for low, high in zip([0, *ends[:-1]], ends, strict=True)]
        by_cublas = [shapes.library.bind(self._stream, part, x, out) for part, out in zip(parts, outs, strict=True)]

        @functools.cache
        def algorithms(size: int) -> list[Algorithm]:
            return [shapes[part.shape[0], depth].algorithms[size] for part in parts]

        @functools.cache
        def few(most: int) -> cuda.Launch | None:
            """Return the kernel's launch, None where cuBLAS takes a few rows too."""
            if len(outs) > MOST_OUTPUTS or not all(shapes[part.shape[0], depth].kernel_agrees for part in parts):
                return None
            return shapes.launch(self._stream, weight, x, outs, most)

        @functools.cache
        def most_few() -> int:
            """Return the rows up to which the kernel is taken."""
            return (
                FEW[-1]
                if few(FEW[-1]) is None
                else shapes.rows_of_kernel(tuple(part.shape[0] for part in parts), depth)
            )

        def multiply(rows: int) -> None:
            most = FEW[-1] if rows <= FEW[-1] else most_few()
            if rows <= most and (launch := few(size_for(rows, (*FEW, *_MORE)))) is not None:
                return launch(-(-total // OUTPUTS), rows)
            for call, algorithm in zip(by_cublas, algorithms(size_for(rows, MANY))):
                call(rows, algorithm)

        return multiply


def output_arguments(outs: Sequence[cuda.Array]) -> list[cuda.Array | int]:
    """Return three outputs, the last for those that are missing, and where the first two end, as kernels take them."""
    ends = [*itertools.accumulate(out.shape[-1] for out in outs)]
    fill = MOST_OUTPUTS - len(outs)
    return [*outs, *[outs[-1]] * fill, *[*ends, *[ends[-1]] * fill][: MOST_OUTPUTS - 1]]


def few_rows_launch(kernel: cuda.Kernel, stream: cuda.Stream, most: int, *arguments: cuda.Array | int) -> cuda.Launch:
    """Return a launch of one of the kernels of up to `most` rows."""
    shared = _STAGES * (OUTPUTS + most) * _STAGE
    return cuda.Launch(kernel, stream, _THREADS, *arguments, overlaps=True, shared=shared)


def size_for(rows: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if rows <= size), sizes[-1])


@functools.cache
def _shapes(device: int) -> _Shapes:
    return _Shapes()


@dataclass(frozen=True)
class _Shape:
    """What multiplies with weights of a shape; kernel_agrees: the kernel too, with the bits of all `algorithms`."""

    kernel_agrees: bool
    algorithms: Mapping[int, Algorithm]  # by the number of rows up to which it is taken


class _Shapes:
    """What multiplies with weights of each shape, [out_features, in_features], on a device: found once."""

    def __init__(self) -> None:
        self.library = CublasLt()
        self._module = cuda.compile_kernels(_SOURCE)
        self._found: dict[tuple[int, int], _Shape] = {}
        self._rows_of_kernel: dict[tuple[tuple[int, ...], int], int] = {}

    def __getitem__(self, shape: tuple[int, int]) -> _Shape:
        if shape not in self._found:
            self._found[shape] = self._choose(*shape)
        return self._found[shape]

    def launch(
        self, stream: cuda.Stream, weight: cuda.Array, x: cuda.Array, outs: Sequence[cuda.Array], most: int
    ) -> cuda.Launch:
        """Return a launch of the kernel for up to `most` rows."""
        given: tuple[cuda.Array | int, ...]
        given = weight, x, *output_arguments(outs), *weight.shape, most
        return few_rows_launch(self._module[f"few_rows_{most}"], stream, most, *given)

    def rows_of_kernel(self, parts: tuple[int, ...], in_features: int) -> int:
        """Return the rows up to which the kernel is faster than cuBLAS at weights that lie one behind the other."""
        key = parts, in_features
        if key not in self._rows_of_kernel:
            self._rows_of_kernel[key] = self._time_kernel(parts, in_features)
        return self._rows_of_kernel[key]

    def _time_kernel(self, parts: Sequence[int], in_features: int) -> int:
        trial = Trial(sum(parts), in_features, _MORE[-1])
        most = FEW[-1]
        ends = [0, *itertools.accumulate(parts)]
        outs = [cuda.empty((_MORE[-1], part), "f2", "trying products out") for part in parts]
        for size in _MORE:
            by_kernel = list[Callable[[], None]]()
            by_cublas = list[Callable[[], None]]()
            for weight in trial.weights:
                try:
                    launch = self.launch(trial.stream, weight, trial.x, outs, size)
                except CheckError:  # more shared memory than this GPU has
                    return most
                by_kernel.append(functools.partial(launch, -(-weight.shape[0] // OUTPUTS), size))
                calls = [
                    functools.partial(
                        self.library.bind(trial.stream, weight[low:high], trial.x, out),
                        size,
                        self[high - low, in_features].algorithms[size],
                    )
                    for low, high, out in zip(ends, ends[1:], outs)
                ]
                by_cublas.append(functools.partial(_call_all, calls))
            if not trial.fastest({True: by_kernel, False: by_cublas}):
                break
            most = size
        return most

    def _choose(self, out_features: int, in_features: int) -> _Shape:
        rows = MANY[-1] if MANY[-1] * out_features <= _MOST_NUMBERS else TIMED
        trial = Trial(out_features, in_features, rows)
        calls = [self.library.bind(trial.stream, weight, trial.x, trial.out) for weight in trial.weights]
        offered = {size: list(self._offered(out_features, in_features, size)) for size in MANY}
        found = dict[Algorithm, bytes]()
        for algorithm in dict.fromkeys(itertools.chain.from_iterable(offered.values())):
            with contextlib.suppress(CheckError):  # one of a shorter product may not run
                found[algorithm] = trial.bits(functools.partial(calls[0], FEW[-1], algorithm))
        if not found:
            raise CheckError(
                f"cuBLAS: expected a product [{out_features}, {in_features}] of fp16 whose columns are not split, "
                "found none; install another cuBLAS"
            )
        expected = next(iter(found.values()))
        agrees = False
        if in_features % ALIGNED == 0:
            launch = self.launch(trial.stream, trial.weights[0], trial.x, [trial.out], FEW[-1])
            by_kernel = trial.bits(lambda: launch(-(-out_features // OUTPUTS), FEW[-1]))
            agrees = by_kernel in found.values()
            expected = by_kernel if agrees else expected
        same = [algorithm for algorithm, bits in found.items() if bits == expected]
        algorithms = dict[int, Algorithm]()
        for size in MANY:
            tried = same if size <= TIMED else [each for each in offered[size] if each in same][:_FIRST]
            tried = tried if size <= rows else tried[:1]
            timed = {each: [functools.partial(call, size, each) for call in calls] for each in tried}
            margin = 1.0 if size <= TIMED else _MARGIN
            algorithms[size] = trial.fastest(timed, margin) if timed else algorithms[TIMED]
        return _Shape(agrees, algorithms)

    def _offered(self, out_features: int, in_features: int, rows: int) -> Iterator[Algorithm]:
        for depth in (in_features, *(depth for depth in _DEPTHS if depth < in_features)):
            yield from self.library.algorithms(out_features, depth, rows)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def trial_factors(columns: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return random rows of a weight and of activations, [_BLOCK, columns] each.

    Of fp16 each number of a row has another that nearly cancels it, somewhere: sums are far smaller than what they pass
    through, so that another order gives other bits in fp16 too, in products of a few columns as well.
    """
    random = np.random.default_rng(0)
    weight, x = (random.standard_normal((_BLOCK, columns), "f4") for _ in range(2))
    if dtype == _HALF:
        weight = (weight * 16).astype(dtype)
        x = (x * 64).astype(dtype)
        order = random.permutation(columns)
        half = columns // 2
        weight[:, order[half : half * 2]] = weight[:, order[:half]]
        x[:, order[half : half * 2]] = x[:, order[half : half * 2]] / dtype.type(1024) - x[:, order[:half]]
    return weight.astype(dtype), x.astype(dtype)


class Trial:
    """Random weights and rows of a shape, on a stream of their own: nothing here waits for other work."""

    def __init__(self, out_features: int, in_features: int, rows: int, dtype: np.dtype = _HALF):
        self.stream = cuda.Stream()
        nbytes = out_features * in_features * dtype.itemsize
        what = "trying products out"
        # Those behind the first are read for the time alone, as a weight is that lies in no cache.
        copies = min(_COPIES, -(-_CACHE // nbytes))
        self.weights = [cuda.empty((out_features, in_features), dtype, what) for _ in range(copies)]
        self.x = cuda.empty((rows, in_features), dtype, what)
        self.out = cuda.empty((rows, out_features), "f2", what)
        # The stream reads them later.
        self._host = weight, x = trial_factors(in_features, dtype)
        for array, host in ((self.weights[0], weight), (self.x, x)):
            first = array[:_BLOCK]
            self.stream.upload(first, host[: first.shape[0]])
            for low in range(_BLOCK, array.shape[0], _BLOCK):
                self.stream.copy(array[low : low + _BLOCK], first)

    def bits(self, multiply: Callable[[], None]) -> bytes:
        """Return the bits of the first rows of a product with the first weight."""
        host = np.empty((FEW[-1], self.out.shape[1]), np.float16)
        multiply()
        self.stream.download(host, self.out[: len(host)])
        self.stream.synchronize()
        return host.tobytes()

    def fastest(self, calls: Mapping[T, Sequence[Callable[[], None]]], margin: float = 1.0) -> T:
        """Return what takes least time, of calls for each of `weights`; the first within a margin, times the least."""
        if len(calls) == 1:
            return next(iter(calls))
        taken = {}
        for key, each in calls.items():
            begin = cuda.Event()
            end = cuda.Event()
            with contextlib.suppress(CheckError):  # what runs for some numbers of rows may not for all
                each[0]()
                begin.record(self.stream)
                for call in (*each, *each):
                    call()
                end.record(self.stream)
                end.wait()
                taken[key] = end.milliseconds_since(begin)
        return next(key for key, milliseconds in taken.items() if milliseconds <= margin * min(taken.values()))
