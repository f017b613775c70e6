"""Run a block, or an attention, of several ranks: one rank after another.

Sums are in rank order. It is what several devices do at once, in its plainest form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lockstep.artifacts.signature import Signature
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass, TensorParallel

Arrays = Mapping[str, np.ndarray]
RunPiece = Callable[[str, int, Arrays], Arrays]  # (graph, rank, what stands there by name) -> outputs by name


def run_sharded_block(
    sharded: ShardedClass, signature: Signature, degree: int, inputs: Arrays, run: RunPiece
) -> dict[str, np.ndarray]:
    """Return a block's outputs, whole, from its whole inputs; signature: of the whole block."""
    ranks: list[dict[str, np.ndarray]] = [
        {name: _part(sharded.values.get(name), array, rank) for name, array in inputs.items()} for rank in range(degree)
    ]
    for piece in sharded.pieces:
        for rank, known in enumerate(ranks):
            known.update(run(piece.graph, rank, known))
        for partial, total in piece.sums.items():
            summed = sum_over_ranks([known[partial] for known in ranks])
            for known in ranks:
                known[total] = summed
    outputs = {}
    for io in signature.outputs:
        shard = sharded.values.get(io.name)
        outputs[io.name] = _joined(shard, [known[io.name] for known in ranks], io.shape) if shard else ranks[0][io.name]
    return outputs


def run_sharded_attention(
    ranks: TensorParallel,
    variant: str,
    signature: Signature,
    shards: Mapping[str, Shard],
    inputs: Arrays,
    run: RunPiece,
) -> dict[str, np.ndarray]:
    """Return an attention's outputs, whole. shards: `attention_shards` of the whole variant."""
    parts = [
        run(variant, rank, {name: _part(shards.get(name), array, rank) for name, array in inputs.items()})
        for rank in range(ranks.degree)
    ]
    return {io.name: _joined(shards[io.name], [part[io.name] for part in parts], io.shape) for io in signature.outputs}


def sum_over_ranks(parts: list[np.ndarray]) -> np.ndarray:
    """Return the sum over the ranks: in their order, in float32."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part
    return total.astype(parts[0].dtype)


def _part(shard: Shard | None, array: np.ndarray, rank: int) -> np.ndarray:
    return np.ascontiguousarray(shard.take(array, rank)) if shard else array


def _joined(shard: Shard, parts: list[np.ndarray], shape: tuple[int | str, ...]) -> np.ndarray:
    sizes = [found if isinstance(size, str) else size for size, found in zip(shape, parts[0].shape, strict=True)]
    whole = np.empty(sizes, parts[0].dtype)
    for rank, part in enumerate(parts):
        shard.put(whole, rank, part)
    return whole
