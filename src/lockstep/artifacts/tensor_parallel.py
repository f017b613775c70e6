"""The tensor-parallel form of an assembly: pieces of blocks, and attention.

Several ranks run it. Between the pieces of a block, partial sums are all-reduced; attention is over a rank's heads.
All ranks run the same graphs; each takes its shard of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from lockstep.artifacts.bounds import Count, FileName, Name
from lockstep.artifacts.document import JsonObject, Key, integers, length
from lockstep.artifacts.graph_files import PHASES, AttentionVariant, GraphFile
from lockstep.targets import MAX_RANKS

if TYPE_CHECKING:
    import numpy as np

_Ranges = Annotated[tuple[tuple[Count, Count], ...], length(10_000, minimum=1)]  # [start, end), of one rank


@dataclass(frozen=True)
class Shard(JsonObject):
    """Each rank's part of a tensor along `axis`: ranges [start, end), concatenated.

    More than one range where a checkpoint fuses weights: a rank takes its heads of q, k and v each.
    """

    axis: Annotated[int, integers(0, 7)]
    ranges: Annotated[tuple[_Ranges, ...], length(MAX_RANKS, minimum=2)]  # by rank

    @classmethod
    def even(cls, axis: int, size: int, degree: int) -> Shard:
        """Return successive equal parts; where there are fewer indices than ranks, several ranks hold the same one."""
        if size % degree == 0:
            part = size // degree
            return cls(axis, tuple(((rank * part, (rank + 1) * part),) for rank in range(degree)))
        # `heads_divide` has checked that every index, a head of keys and values, goes to the same number of ranks.
        starts = [rank * size // degree for rank in range(degree)]
        return cls(axis, tuple(((start, start + 1),) for start in starts))

    def scaled(self, unit: int) -> Shard:
        """Return the shard of a tensor with `unit` indices for each of this one, such as a head's numbers."""
        ranges = []
        for rank in self.ranges:
            ranges.append(tuple((low * unit, high * unit) for low, high in rank))
        return Shard(self.axis, tuple(ranges))

    @property
    def count(self) -> int:
        """Return the size of a rank's part along the axis; it is the same for all ranks."""
        return sum(high - low for low, high in self.ranges[0])

    def shape(self, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    def take(self, array: np.ndarray, rank: int) -> np.ndarray:
        """Return a rank's part of a whole tensor: a view where it is one range."""
        import numpy as np

        before = (slice(None),) * self.axis
        parts = [array[(*before, slice(low, high))] for low, high in self.ranges[rank]]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, self.axis)

    def put(self, array: np.ndarray, rank: int, part: np.ndarray) -> None:
        """Write a rank's part into the whole tensor `array`."""
        before = (slice(None),) * self.axis
        at = 0
        for low, high in self.ranges[rank]:
            array[(*before, slice(low, high))] = part[(*before, slice(at, at + high - low))]
            at += high - low


@dataclass(frozen=True)
class ShardEntry:
    """The name of the graph that a rank runs between two all-reduces.

    sums: {partial sum, an output: name of the all-reduced value that later pieces, or the block's readers, take}.
    """

    graph: Annotated[Name, Key("class")]
    sums: Mapping[Name, Name]


@dataclass(frozen=True)
class ShardedClass:
    """A block class in pieces.

    values: {input or output: shard}; those that are not named are whole, the same at each rank. weights: {slot: shard}.
    first: slots that the first rank takes, and the others zeros: a bias of partial sums must be added once.
    """

    pieces: Annotated[tuple[ShardEntry, ...], length(100, minimum=1)]
    values: Mapping[Name, Shard]
    weights: Mapping[Name, Shard]
    first: Annotated[tuple[Name, ...], length(10_000)]

    def take_weight(self, slot: str, array: np.ndarray, rank: int) -> np.ndarray:
        """Return a rank's part of the whole slot's array."""
        if slot in self.first and rank > 0:
            import numpy as np

            return np.zeros_like(array)
        shard = self.weights.get(slot)
        if shard is None:
            return array
        return shard.take(array, rank)


@dataclass(frozen=True)
class TensorParallel:
    """The graphs that the ranks of a model run instead of its blocks and attention.

    degree: how many ranks. graphs: {name: graph of a piece}. classes: those of the assembly but for the embedding,
    which each rank runs whole. variants: the assembly's attention with a rank's heads.
    """

    degree: Annotated[int, integers(2, MAX_RANKS)]
    graphs: Mapping[FileName, GraphFile]
    classes: Mapping[Name, ShardedClass]
    variants: Annotated[Mapping[FileName, AttentionVariant], Key("kinds")]

    def all_graphs(self) -> Iterator[tuple[str, GraphFile]]:
        """Yield (name, graph) of all that ranks run but the embedding."""
        for name in sorted(self.graphs):
            yield name, self.graphs[name]
        for name in sorted(self.variants):
            for phase in sorted(PHASES):
                yield f"{name}.{phase}", self.variants[name].phases()[phase]


def attention_shards(variant: AttentionVariant, degree: int) -> dict[str, Shard]:
    """Return the shards of an attention's inputs and outputs: a rank's heads of each."""
    heads = Shard.even(1, variant.num_heads, degree)
    kv_heads = Shard.even(1, variant.num_kv_heads, degree)
    return {
        "query": heads.scaled(variant.head_dim),
        "key": kv_heads.scaled(variant.head_dim),
        "value": kv_heads.scaled(variant.value_head_dim),
        "attention": heads.scaled(variant.value_head_dim),
        **dict.fromkeys(("past_key", "past_value", "key_out", "value_out"), kv_heads),
    }


def heads_divide(num_heads: int, num_kv_heads: int, degree: int) -> bool:
    """Return whether each rank can have as many heads as the others: those of keys and values may be replicated."""
    # Multi-query attention's single head is replicated on every rank.
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)
