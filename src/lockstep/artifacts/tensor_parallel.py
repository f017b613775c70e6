"""The tensor-parallel form of an assembly: pieces of blocks, and attention.

It is what several ranks run. Between the pieces of a block partial sums are added (all-reduce); attention is over a
rank's heads. All ranks run the same graphs; each takes its part of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.artifacts.graph_files import GRAPH, PHASES, VARIANT, AttentionVariant, GraphFile
from lockstep.artifacts.manifests import FILE, LARGEST, NAME
from lockstep.artifacts.schema import integer, items, mapping, record
from lockstep.targets import MOST_RANKS

_SHARD = record(
    {
        "axis": integer(0, 7),
        "ranges": items(
            items(items(integer(0, LARGEST), most=2, least=2), most=10_000, least=1), most=MOST_RANKS, least=2
        ),
    }
)
_CLASS = record(
    {
        "pieces": items(record({"class": NAME, "sums": mapping(NAME, NAME)}), most=100, least=1),
        "values": mapping(_SHARD, NAME),
        "weights": mapping(_SHARD, NAME),
        "first": items(NAME, most=10_000),
    }
)
TENSOR_PARALLEL = record(
    {
        "degree": integer(2, MOST_RANKS),
        "graphs": mapping(GRAPH, FILE),
        "classes": mapping(_CLASS, NAME),
        "kinds": mapping(VARIANT, FILE),
    }
)


@dataclass(frozen=True)
class Shard:
    """Each rank's part of a tensor along `axis`.

    `ranges[rank]`: [start, end) one after another.
    """

    axis: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shard:
        return cls(value["axis"], tuple(tuple((low, high) for low, high in rank) for rank in value["ranges"]))

    @classmethod
    def even(cls, axis: int, size: int, degree: int) -> Shard:
        """Return successive parts of equal size.

        Where there are fewer numbers than ranks, successive ranks hold the same one.
        """
        if size % degree == 0:
            part = size // degree
            return cls(axis, tuple(((rank * part, (rank + 1) * part),) for rank in range(degree)))
        starts = [rank * size // degree for rank in range(degree)]
        return cls(axis, tuple(((start, start + 1),) for start in starts))

    def to_json(self) -> dict[str, Any]:
        return {"axis": self.axis, "ranges": [[list(pair) for pair in rank] for rank in self.ranges]}

    def scaled(self, unit: int) -> Shard:
        """Return the shard of a tensor that has `unit` numbers where this one has one."""
        return Shard(self.axis, tuple(tuple((low * unit, high * unit) for low, high in rank) for rank in self.ranges))

    @property
    def count(self) -> int:
        """Return the size of a rank's part along the axis; it is the same for all ranks."""
        return sum(high - low for low, high in self.ranges[0])

    def shape(self, whole: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """Return a rank's shape of a tensor of shape `whole`."""
        return (*whole[: self.axis], self.count, *whole[self.axis + 1 :])

    def take(self, array: np.ndarray, rank: int) -> np.ndarray:
        """Return a rank's part of a whole tensor: a view where it lies in one range."""
        before = (slice(None),) * self.axis
        parts = [array[(*before, slice(low, high))] for low, high in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, self.axis)

    def put(self, array: np.ndarray, rank: int, part: np.ndarray) -> None:
        """Write a rank's part into a whole tensor."""
        before, at = (slice(None),) * self.axis, 0
        for low, high in self.ranges[rank]:
            array[(*before, slice(low, high))] = part[(*before, slice(at, at + high - low))]
            at += high - low


@dataclass(frozen=True)
class ShardEntry:
    """The graph, by name, that a rank runs between two all-reduces.

    sums: {partial sum that it gives: the name under which later pieces, or the block's readers, find their sum}.
    """

    graph: str
    sums: Mapping[str, str]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ShardEntry:
        return cls(value["class"], value["sums"])

    def to_json(self) -> dict[str, Any]:
        return {"class": self.graph, "sums": dict(self.sums)}


@dataclass(frozen=True)
class ShardedClass:
    """A block class in pieces.

    values: what ranks hold of its inputs and outputs; those that are not named are whole, the same at each rank.
    weights: what they take of its slots. first: slots that the first rank takes, and the others zeros: biases of
    partial sums.
    """

    pieces: tuple[ShardEntry, ...]
    values: Mapping[str, Shard]
    weights: Mapping[str, Shard]
    first: tuple[str, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ShardedClass:
        shards = lambda key: {name: Shard.from_json(entry) for name, entry in value[key].items()}
        return cls(
            tuple(map(ShardEntry.from_json, value["pieces"])),
            shards("values"),
            shards("weights"),
            tuple(value["first"]),
        )

    def to_json(self) -> dict[str, Any]:
        shards = lambda entries: {name: shard.to_json() for name, shard in sorted(entries.items())}
        return {
            "pieces": [piece.to_json() for piece in self.pieces],
            "values": shards(self.values),
            "weights": shards(self.weights),
            "first": list(self.first),
        }

    def take_weight(self, slot: str, array: np.ndarray, rank: int) -> np.ndarray:
        """Return what a rank's slot takes of the whole slot's array."""
        if slot in self.first:
            return array if rank == 0 else np.zeros_like(array)
        shard = self.weights.get(slot)
        return shard.take(array, rank) if shard else array


@dataclass(frozen=True)
class TensorParallel:
    """The graphs that the ranks of a model run instead of its blocks and attention.

    degree: how many ranks. graphs: of the pieces, by name. classes: of the assembly but for the embedding, which each
    rank runs whole. variants: the assembly's attention with a rank's heads.
    """

    degree: int
    graphs: Mapping[str, GraphFile]
    classes: Mapping[str, ShardedClass]
    variants: Mapping[str, AttentionVariant]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorParallel:
        return cls(
            value["degree"],
            {name: GraphFile.from_json(entry) for name, entry in value["graphs"].items()},
            {name: ShardedClass.from_json(entry) for name, entry in value["classes"].items()},
            {name: AttentionVariant.from_json(entry) for name, entry in value["kinds"].items()},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "degree": self.degree,
            "graphs": {name: graph.to_json() for name, graph in self.graphs.items()},
            "classes": {name: sharded.to_json() for name, sharded in self.classes.items()},
            "kinds": {name: variant.to_json() for name, variant in self.variants.items()},
        }

    def all_graphs(self) -> Iterator[tuple[str, GraphFile]]:
        """Yield (name, graph) of all that ranks run but the embedding."""
        for name in sorted(self.graphs):
            yield name, self.graphs[name]
        for name in sorted(self.variants):
            for phase in sorted(PHASES):
                yield f"{name}.{phase}", self.variants[name].phases()[phase]


def attention_shards(whole: AttentionVariant, degree: int) -> dict[str, Shard]:
    """Return what ranks hold of the inputs and outputs of an attention: its heads."""
    heads = Shard.even(1, whole.num_heads, degree)
    kv_heads = Shard.even(1, whole.num_kv_heads, degree)
    return {
        "query": heads.scaled(whole.head_dim),
        "key": kv_heads.scaled(whole.head_dim),
        "value": kv_heads.scaled(whole.value_head_dim),
        "attention": heads.scaled(whole.value_head_dim),
        **dict.fromkeys(("past_key", "past_value", "key_out", "value_out"), kv_heads),
    }


def heads_divide(num_heads: int, num_kv_heads: int, degree: int) -> bool:
    """Return whether each rank can have as many heads as the others.

    With the key and value heads that they share.
    """
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)
