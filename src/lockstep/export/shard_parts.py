"""The parts of a tensor that ranks hold, and what an operator needs of its inputs where they hold parts of its outputs.

Parts lie along one axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from lockstep.artifacts.tensor_parallel import Shard
from lockstep.export.axes import ELEMENTWISE, REDUCTIONS, Operator, axes_of_inputs
from lockstep.onnx_tools.rewriter import Dims, attributes_of

# Operators whose constants `shards` brings to a rank's sizes, where they have some.
_SPLIT = ELEMENTWISE.union(
    REDUCTIONS, "Concat Expand Gather LayerNormalization Slice Softmax Squeeze Transpose Unsqueeze".split()
)


@dataclass(frozen=True, eq=False)
class ShardIndices:
    """The indices along an axis that each rank holds: [ranks, held] int64, ascending within a section."""

    axis: int
    indices: np.ndarray

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardIndices) and self.axis == other.axis and np.array_equal(self.indices, other.indices)
        )

    @classmethod
    def of(cls, shard: Shard) -> ShardIndices:
        ranks = [np.concatenate([np.arange(*part) for part in rank]) for rank in shard.ranges]
        return cls(shard.axis, np.stack(ranks))

    @property
    def shard(self) -> Shard:
        """Return the same in the assembly's form."""
        runs = [np.split(held, np.flatnonzero(np.diff(held) != 1) + 1) for held in self.indices]
        return Shard(self.axis, tuple(tuple((int(run[0]), int(run[-1]) + 1) for run in rank) for rank in runs))

    @property
    def count(self) -> int:
        return self.indices.shape[1]

    def at(self, axis: int, indices: np.ndarray | None = None) -> ShardIndices:
        return ShardIndices(axis, self.indices if indices is None else indices)


def even(axis: int, size: int, ranks: int) -> ShardIndices | None:
    """Return successive parts, shared where there are fewer numbers than ranks; None where uneven."""
    return ShardIndices.of(Shard.even(axis, size, ranks)) if size % ranks == 0 or ranks % size == 0 else None


Needs = list[tuple[str, ShardIndices]]


class NotSplit(Exception):
    """Raised for a part that cannot be split, with the reason."""


class Uneven(NotSplit):
    """A part whose size does not divide by the ranks; left whole, each rank would do all the work."""


def merged(name: str, wants: Sequence[ShardIndices]) -> ShardIndices:
    """Return the one part that all readers of a value want, or sections of it in a row. Raises NotSplit for none."""
    if all(want == wants[0] for want in wants):
        return wants[0]
    if len({want.axis for want in wants}) > 1:
        raise NotSplit(f"{name} is read along different axes")
    distinct: list[ShardIndices] = []
    for want in wants:
        if not any(want == other for other in distinct):
            distinct.append(want)
    ordered = sorted(distinct, key=lambda want: int(want.indices.min()))
    for one, other in zip(ordered, ordered[1:]):
        if one.indices.max() >= other.indices.min():
            raise NotSplit(f"{name} is read in parts that overlap")
    return ShardIndices(ordered[0].axis, np.concatenate([want.indices for want in ordered], axis=1))


def reshaped(before: Dims, after: Dims, part: ShardIndices) -> ShardIndices:
    """Return what is held of a value once its shape `before` becomes `after`.

    Raises NotSplit where it is no part along one axis. Sizes that are names stand for a number of tokens.
    """
    old, new = ([size if isinstance(size, int) else _TOKENS for size in shape] for shape in (before, after))
    if (count := math.prod(old)) == math.prod(new):
        numbers = np.arange(count).reshape(old)
        targets = np.arange(count).reshape(new)
        taken = [np.take(numbers, indices, part.axis).reshape(-1) for indices in part.indices]
        for axis, size in enumerate(after):
            if not isinstance(size, int) or math.prod(new[: axis + 1]) < math.prod(old[: part.axis]):
                continue
            rows = [np.unravel_index(held, new)[axis] for held in taken]
            kept = [rows_of[np.sort(np.unique(rows_of, return_index=True)[1])] for rows_of in rows]
            if len({len(held) for held in kept}) == 1 and all(
                np.array_equal(np.take(targets, indices, axis).reshape(-1), held)
                for indices, held in zip(kept, taken, strict=True)
            ):
                return ShardIndices(axis, np.stack(kept))
    raise NotSplit(f"a reshape of {list(before)} to {list(after)} does not keep the ranks' parts together")


_TOKENS = 3  # any number of them


@dataclass(frozen=True)
class Operators:
    """What the operators of one graph need of their inputs; shapes: of its values; constants: its initializers."""

    shapes: Mapping[str, Dims]
    constants: Mapping[str, np.ndarray]
    ranks: int

    def needs(self, node: onnx.NodeProto, parts: Mapping[str, ShardIndices]) -> Needs:
        """Return (input, part) of each input that must be split; parts: of the outputs. Raises NotSplit."""
        name, part = next(iter(parts.items()))
        value = node.input[0]
        operator = self._operator(node)
        if node.op_type == "Reshape":
            return [(value, reshaped(self.shapes[name], self.shapes[value], part))]
        if node.op_type == "Split":
            return [(value, self._before_split(node, parts, operator.axis(0)))]
        if node.op_type == "Slice" and (begin := self._begin(node, part.axis)) is not None:
            return [(value, part.at(part.axis, part.indices + begin))]
        if node.op_type == "Concat" and operator.axis(0) == part.axis:
            return self._joined(node, part)
        axes = axes_of_inputs(operator, part.axis) if node.op_type in _SPLIT else None
        if axes is None:
            raise NotSplit(f"{node.op_type} is not known to be split")
        needs = [
            (other, part.at(axis))
            for other, axis in zip(node.input, axes, strict=True)
            if axis is not None and not self._is_repeated(node, other, axis) and not self._is_alike(other, axis, part)
        ]
        if node.op_type not in ELEMENTWISE | {"Concat"} and [other for other, _ in needs] != [value]:
            raise NotSplit(f"{node.op_type} goes over all of what would be split")
        return needs

    def size(self, name: str, axis: int) -> int:
        size = self.shapes[name][axis]
        if not isinstance(size, int):
            raise NotSplit(f"{name} has no fixed size along axis {axis}")
        return size

    def _operator(self, node: onnx.NodeProto) -> Operator:
        inputs, outputs = ([self.shapes.get(name, ()) for name in names] for names in (node.input, node.output))
        constants = self.constants
        return Operator(
            node.op_type, attributes_of(node), inputs, outputs, lambda position: constants.get(node.input[position])
        )

    def _is_repeated(self, node: onnx.NodeProto, name: str, axis: int) -> bool:
        """Return whether one number stands beside several of another input."""
        return node.op_type in ELEMENTWISE and len(node.input) > 1 and self.shapes[name][axis] == 1

    def _is_alike(self, name: str, axis: int, part: ShardIndices) -> bool:
        """Return whether an input is a constant, which must be the same at all ranks, as engines are."""
        if name not in self.constants:
            return False
        taken = [np.take(self.constants[name], indices, axis) for indices in part.indices]
        if any(not np.array_equal(other, taken[0]) for other in taken):
            raise NotSplit(f"a constant of {self.constants[name].shape} differs between the ranks' parts")
        return True

    def _begin(self, node: onnx.NodeProto, part_axis: int) -> int | None:
        """Return where a slice of an axis begins; None where it takes all of it."""
        value = node.input[0]
        starts, _, axes, *steps = (self.constants[other].tolist() for other in node.input[1:5])
        for number, (start, axis) in enumerate(zip(starts, axes, strict=True)):
            if axis % len(self.shapes[value]) == part_axis:
                if steps and steps[0][number] != 1:
                    raise NotSplit("every other number of what would be split is taken")
                return start if start >= 0 else start + self.size(value, part_axis)
        return None

    def _before_split(self, node: onnx.NodeProto, parts: Mapping[str, ShardIndices], axis: int) -> ShardIndices:
        wants = []
        offset = 0
        for name in node.output:
            if name not in parts:
                raise NotSplit(f"{name} is not read")
            part = parts[name]
            wants.append(part.at(axis, part.indices + offset) if part.axis == axis else part)
            offset += self.size(name, axis)
        return merged(node.input[0], wants)

    def _joined(self, node: onnx.NodeProto, part: ShardIndices) -> Needs:
        """Return what each rank holds of values that are joined along the axis of its part."""
        needs = []
        offset = 0
        for value in node.input:
            size = self.size(value, part.axis)
            inside = (part.indices >= offset) & (part.indices < offset + size)
            counts = inside.sum(axis=1)
            if counts.min() != counts.max() or not counts.min():
                raise NotSplit("ranks hold different numbers of what is joined")
            needs.append((value, part.at(part.axis, part.indices[inside].reshape(self.ranks, -1) - offset)))
            offset += size
        return needs
