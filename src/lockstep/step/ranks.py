"""Several ranks in one process, on host arrays.

What a step calls as one engine runs each rank's, one rank after another, with sums in rank order. For checks of what
several devices will run, and for tests, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.artifacts.signature import IO, Signature
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass
from lockstep.step.executable import Declared, Executable, HostExecutable, Run

Arrays = Mapping[str, np.ndarray]


class _Declared(NamedTuple):
    dtype: np.dtype
    shape: Sequence[int | str]


class ShardOutputs(NamedTuple):
    """A block in two calls, `run` and `gather`.

    parts: by name of an output what each rank has of it after `run`; `gather` puts it together.
    """

    run: Run
    parts: Mapping[str, Sequence[np.ndarray]]
    gather: Run


class RankBlock:
    """A block of several engine calls, of several ranks.

    runs[piece][rank]: its engines with their weights, in the order of the pieces. signature: of the whole block;
    signatures: of the pieces.
    """

    def __init__(
        self,
        sharded: ShardedClass,
        signature: Signature,
        signatures: Sequence[Signature],
        runs: Sequence[Sequence[Executable]],
    ):
        self._sharded, self._signature, self._signatures, self._runs = sharded, signature, signatures, runs
        self.where, self.inputs, self.outputs = _where(runs[0][0]), *_declared(signature)

    def prepare(self, inputs: Arrays, outputs: Arrays) -> Run:
        calls, ranks = self._prepare(inputs, outputs)
        return _all([*calls, *self._puts(ranks, outputs)])

    def prepare_parts(self, inputs: Arrays, outputs: Arrays) -> ShardOutputs:
        """Bind the block as two calls, of which the second gathers sharded outputs.

        As `prepare` otherwise: what of `outputs` each rank has a part of is there after the second.
        """
        calls, ranks = self._prepare(inputs, outputs)
        parts = {name: [known[name] for known in ranks] for name in outputs if name in self._sharded.values}
        return ShardOutputs(_all(calls), parts, _all(self._puts(ranks, outputs)))

    def _prepare(self, inputs: Arrays, outputs: Arrays) -> tuple[list[Run], list[dict[str, np.ndarray]]]:
        """Return the calls of all pieces, and the arrays that they read and write.

        The arrays are by rank and name.
        """
        sizes = _sizes(self._signature, inputs, outputs)
        degree = len(self._runs[0])
        values = self._sharded.values
        ranks: list[dict[str, np.ndarray]] = [{} for _ in range(degree)]
        calls: list[Run] = []
        for name, array in inputs.items():
            for rank, known in enumerate(ranks):
                known[name] = _brought(values.get(name), array, rank, calls)
        for piece, signature, runs in zip(self._sharded.pieces, self._signatures, self._runs, strict=True):
            for rank, (known, run) in enumerate(zip(ranks, runs, strict=True)):
                made = {io.name: self._result(io, rank, outputs, sizes) for io in signature.outputs}
                calls.append(run.prepare({io.name: known[io.name] for io in signature.inputs}, made))
                known.update(made)
            for partial, total in piece.sums.items():
                parts = [known[partial] for known in ranks]
                result = outputs[total] if total in outputs else np.empty_like(parts[0])
                calls.append(_adding(parts, result))
                for known in ranks:
                    known[total] = result
        return calls, ranks

    def _puts(self, ranks: Sequence[Arrays], outputs: Arrays) -> list[Run]:
        """Put what ranks have parts of together."""
        return [
            _putting(shard, array, rank, known[name])
            for name, array in outputs.items()
            if (shard := self._sharded.values.get(name)) is not None
            for rank, known in enumerate(ranks)
        ]

    def _result(self, io: IO, rank: int, outputs: Arrays, sizes: Mapping[str, int]) -> np.ndarray:
        """Return the array that a rank writes a result to.

        The first rank's whole results are the block's own.
        """
        if rank == 0 and io.name in outputs and io.name not in self._sharded.values:
            return outputs[io.name]
        return np.empty([sizes[size] if isinstance(size, str) else size for size in io.shape], io.numpy_dtype)


class RankAttention:
    """An attention's phase over all heads, by engines for a rank's heads.

    shards: see `attention_shards`.
    """

    def __init__(self, shards: Mapping[str, Shard], signature: Signature, run: Executable, degree: int):
        self._shards = shards
        self._run = run
        self._degree = degree
        self.where, self.inputs, self.outputs = _where(run), *_declared(signature)

    def prepare(self, inputs: Arrays, outputs: Arrays) -> Run:
        calls: list[Run] = []
        for rank in range(self._degree):
            given = {name: _brought(self._shards.get(name), array, rank, calls) for name, array in inputs.items()}
            made = {name: np.empty_like(self._shards[name].take(array, rank)) for name, array in outputs.items()}
            made = {name: np.ascontiguousarray(array) for name, array in made.items()}
            calls.append(self._run.prepare(given, made))
            calls += [_putting(self._shards[name], array, rank, made[name]) for name, array in outputs.items()]
        return _all(calls)


def _where(run: Executable) -> str:
    assert isinstance(run, HostExecutable)  # ranks are of engines on host arrays
    return run.where


def _declared(signature: Signature) -> tuple[dict[str, Declared], dict[str, Declared]]:
    inputs, outputs = (
        {io.name: _Declared(io.numpy_dtype, io.shape) for io in ios} for ios in (signature.inputs, signature.outputs)
    )
    return dict(inputs), dict(outputs)


def _sizes(signature: Signature, inputs: Arrays, outputs: Arrays) -> dict[str, int]:
    """Return the sizes that the names in the shapes stand for."""
    found: dict[str, int] = {}
    for ios, arrays in ((signature.inputs, inputs), (signature.outputs, outputs)):
        for io in ios:
            found |= {size: real for size, real in zip(io.shape, arrays[io.name].shape) if isinstance(size, str)}
    return found


def _brought(shard: Shard | None, array: np.ndarray, rank: int, calls: list[Run]) -> np.ndarray:
    """Return a rank's part of an input; the array itself where it is whole.

    `calls` gains a call that copies the part.
    """
    if shard is None:
        return array
    own = np.array(shard.take(array, rank), order="C")

    def bring() -> None:
        np.copyto(own, shard.take(array, rank))

    calls.append(bring)
    return own


def _putting(shard: Shard, array: np.ndarray, rank: int, part: np.ndarray) -> Run:
    return lambda: shard.put(array, rank, part)


def _adding(parts: Sequence[np.ndarray], result: np.ndarray) -> Run:
    def add() -> None:
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part
        np.copyto(result, total, casting="same_kind")

    return add


def _all(calls: Sequence[Callable[[], None]]) -> Run:
    def run() -> None:
        for call in calls:
            call()

    return run
