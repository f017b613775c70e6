"""A rank's shard of the weights of one block: `Tensors` by slot name."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.artifacts.signature import IO
from lockstep.artifacts.tensor_parallel import ShardedClass
from lockstep.weights.reader import Weights
from lockstep.weights.slots import slot_array


class RankWeights:
    """The arrays of a rank, by the name of a slot of the whole block. Check the slots first.

    signature_slots: the slots of the whole block. slots: {slot: tensors} of the block in this layer.
    """

    def __init__(
        self,
        weights: Weights,
        slots: Mapping[str, Sequence[str]],
        signature_slots: Sequence[IO],
        sharded: ShardedClass,
        rank: int,
    ):
        self._weights = weights
        self._slots = slots
        self._sharded = sharded
        self._rank = rank
        self._sizes = {slot.name: slot.sizes for slot in signature_slots}

    @property
    def checkpoint(self) -> object:
        return self._weights

    def identity(self, slot: str) -> Hashable:
        # A bias that only the first rank adds is zeros on the other ranks: another array of the same tensor.
        zeros = slot in self._sharded.first and self._rank > 0
        return tuple(self._slots[slot]), self._sharded.weights.get(slot), zeros, self._rank

    def __getitem__(self, slot: str) -> np.ndarray:
        """Return the rank's shard: a view of the file, maybe with gaps; a copy of a fused slot or of several ranges."""
        array = slot_array(self._weights, self._slots[slot], self._sizes[slot])
        return self._sharded.take_weight(slot, array, self._rank)

    def location(self, slot: str) -> tuple[Path, int, int] | None:
        """Return (path of the file, offset in bytes, length in bytes) of a slot that is a whole tensor, else None."""
        is_whole = slot not in self._sharded.weights and (slot not in self._sharded.first or self._rank == 0)
        names = self._slots[slot]
        if not is_whole or len(names) > 1:
            return None
        return self._weights.location(names[0])
