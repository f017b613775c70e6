"""Tensor parallelism in one process on host arrays: for checks and tests of a sharded model on a CPU.

A block or an attention looks like one engine to a step, and runs each rank's engines in turn; sums are in rank order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.artifacts.signature import IO, Signature, concrete_shape
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass
from lockstep.step.executable import Call, Declared, Executable, HostExecutable

Arrays = Mapping[str, np.ndarray]


class _Declared(NamedTuple):
    dtype: np.dtype
    shape: Sequence[int | str]


class ShardOutputs(NamedTuple):
    """A block in two calls; parts: by output, its shards after `call`, which `gather` puts together."""

    call: Call
    parts: Mapping[str, Sequence[np.ndarray]]
    gather: Call


class RankBlock:
    """A block of several pieces on several ranks.

    signature: of the whole block; signatures: of the pieces. engines: [piece][rank].
    """

    def __init__(
        self,
        sharded: ShardedClass,
        signature: Signature,
        signatures: Sequence[Signature],
        engines: Sequence[Sequence[Executable]],
    ):
        self._sharded = sharded
        self._signature = signature
        self._signatures = signatures
        self._engines = engines
        self.where = _where(engines[0][0])
        self.inputs = _declared(signature.inputs)
        self.outputs = _declared(signature.outputs)

    def prepare(self, inputs: Arrays, outputs: Arrays) -> Call:
        calls, ranks = self._prepare(inputs, outputs)
        return _sequence([*calls, *self._gather_calls(ranks, outputs)])

    def prepare_parts(self, inputs: Arrays, outputs: Arrays) -> ShardOutputs:
        """Bind the block as two calls: sharded outputs are complete after the second, the others after the first."""
        calls, ranks = self._prepare(inputs, outputs)
        parts = {name: [arrays[name] for arrays in ranks] for name in outputs if name in self._sharded.values}
        return ShardOutputs(_sequence(calls), parts, _sequence(self._gather_calls(ranks, outputs)))

    def _prepare(self, inputs: Arrays, outputs: Arrays) -> tuple[list[Call], list[dict[str, np.ndarray]]]:
        """Return the calls of all pieces, and each rank's named arrays."""
        sizes = _sizes(self._signature, inputs, outputs)
        degree = len(self._engines[0])
        shards = self._sharded.values
        ranks: list[dict[str, np.ndarray]] = [{} for _ in range(degree)]
        calls: list[Call] = []
        for name, array in inputs.items():
            for rank, arrays in enumerate(ranks):
                arrays[name] = _rank_input(shards.get(name), array, rank, calls)
        for piece, signature, engines in zip(self._sharded.pieces, self._signatures, self._engines, strict=True):
            for rank, (arrays, engine) in enumerate(zip(ranks, engines, strict=True)):
                piece_inputs = {io.name: arrays[io.name] for io in signature.inputs}
                piece_outputs = {io.name: self._output(io, rank, outputs, sizes) for io in signature.outputs}
                calls.append(engine.prepare(piece_inputs, piece_outputs))
                arrays.update(piece_outputs)
            for partial_name, total_name in piece.sums.items():
                partials = [arrays[partial_name] for arrays in ranks]
                # All ranks read one array: they run one after another in this process.
                if total_name in outputs:
                    total = outputs[total_name]
                else:
                    total = np.empty_like(partials[0])
                calls.append(functools.partial(_all_reduce, partials, total))
                for arrays in ranks:
                    arrays[total_name] = total
        return calls, ranks

    def _gather_calls(self, ranks: Sequence[Arrays], outputs: Arrays) -> list[Call]:
        calls: list[Call] = []
        for name, array in outputs.items():
            shard = self._sharded.values.get(name)
            if shard is not None:
                for rank, arrays in enumerate(ranks):
                    calls.append(functools.partial(shard.put, array, rank, arrays[name]))
        return calls

    def _output(self, io: IO, rank: int, outputs: Arrays, sizes: Mapping[str, int]) -> np.ndarray:
        """Return the array of a rank's output; the first rank writes outputs that are not sharded in place."""
        if rank == 0 and io.name in outputs and io.name not in self._sharded.values:
            return outputs[io.name]
        return np.empty(concrete_shape(io.shape, sizes), io.numpy_dtype)


class RankAttention:
    """A phase of attention over all heads, by an engine for one rank's heads; shards: see `attention_shards`."""

    def __init__(self, shards: Mapping[str, Shard], signature: Signature, engine: Executable, degree: int):
        self._shards = shards
        self._engine = engine
        self._degree = degree
        self.where = _where(engine)
        self.inputs = _declared(signature.inputs)
        self.outputs = _declared(signature.outputs)

    def prepare(self, inputs: Arrays, outputs: Arrays) -> Call:
        calls: list[Call] = []
        for rank in range(self._degree):
            rank_inputs = {}
            for name, array in inputs.items():
                rank_inputs[name] = _rank_input(self._shards.get(name), array, rank, calls)
            rank_outputs = {}
            for name, array in outputs.items():
                rank_outputs[name] = np.empty_like(self._shards[name].take(array, rank), order="C")
            calls.append(self._engine.prepare(rank_inputs, rank_outputs))
            for name, array in outputs.items():
                calls.append(functools.partial(self._shards[name].put, array, rank, rank_outputs[name]))
        return _sequence(calls)


def _where(engine: Executable) -> str:
    assert isinstance(engine, HostExecutable)  # ranks are of engines on host arrays
    return engine.where


def _declared(ios: Sequence[IO]) -> dict[str, Declared]:
    return {io.name: _Declared(io.numpy_dtype, io.shape) for io in ios}


def _sizes(signature: Signature, inputs: Arrays, outputs: Arrays) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for ios, arrays in ((signature.inputs, inputs), (signature.outputs, outputs)):
        for io in ios:
            for dim, size in zip(io.shape, arrays[io.name].shape):
                if isinstance(dim, str):
                    sizes[dim] = size
    return sizes


def _rank_input(shard: Shard | None, array: np.ndarray, rank: int, calls: list[Call]) -> np.ndarray:
    """Return a rank's shard of an input, which a call that is added to `calls` copies; the array if not sharded."""
    if shard is None:
        return array
    part = np.array(shard.take(array, rank), order="C")

    def copy_shard() -> None:
        np.copyto(part, shard.take(array, rank))

    calls.append(copy_shard)
    return part


def _all_reduce(partials: Sequence[np.ndarray], total: np.ndarray) -> None:
    """Write the sum of the ranks' arrays, accumulated in float32 in rank order."""
    accumulated = partials[0].astype(np.float32)
    for partial in partials[1:]:
        accumulated += partial
    np.copyto(total, accumulated, casting="same_kind")


def _sequence(calls: Sequence[Callable[[], None]]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run
