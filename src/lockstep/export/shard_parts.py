"""The shards of a tensor along one axis, and how an operator passes shards of its outputs on to its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from lockstep.artifacts.tensor_parallel import Shard
from lockstep.export.axes import ELEMENTWISE, REDUCTIONS, Operator, axes_of_inputs
from lockstep.onnx_tools.values import array_of, required, shape_of

# Operators for which `shards` can cut constants to a rank's sizes.
_SPLIT = ELEMENTWISE.union(
    REDUCTIONS, "Concat Expand Gather LayerNormalization Slice Softmax Squeeze Transpose Unsqueeze".split()
)


@dataclass(frozen=True, eq=False)
class ShardIndices:
    """The indices along an axis that each rank has: [ranks, count] int64, ascending within a section."""

    axis: int
    indices: np.ndarray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardIndices):
            return False
        return self.axis == other.axis and np.array_equal(self.indices, other.indices)

    @classmethod
    def from_shard(cls, shard: Shard) -> ShardIndices:
        ranks = []
        for ranges in shard.ranges:
            ranks.append(np.concatenate([np.arange(*bounds) for bounds in ranges]))
        return cls(shard.axis, np.stack(ranks))

    @property
    def shard(self) -> Shard:
        """Return the same shards as ranges, in the assembly's form."""
        ranges = []
        for indices in self.indices:
            runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
            ranges.append(tuple((int(run[0]), int(run[-1]) + 1) for run in runs))
        return Shard(self.axis, tuple(ranges))

    @property
    def count(self) -> int:
        return self.indices.shape[1]

    def on_axis(self, axis: int) -> ShardIndices:
        return ShardIndices(axis, self.indices)


def even_shard(axis: int, size: int, ranks: int) -> ShardIndices | None:
    """Return successive equal shards, shared where there are fewer numbers than ranks; None where uneven."""
    if size % ranks and ranks % size:
        return None
    return ShardIndices.from_shard(Shard.even(axis, size, ranks))


InputShards = list[tuple[ir.Value, ShardIndices]]


class SplitError(Exception):
    """Raised for a value that cannot be split, with the reason."""


class UnevenSplitError(SplitError):
    """Raised for a size that does not divide by the ranks; left whole, each rank would do all the work."""


def merge_shards(value: ir.Value, shards: Sequence[ShardIndices]) -> ShardIndices:
    """Return the shards that suit all readers of a value: theirs if equal, else their sections side by side.

    Raises SplitError where the readers' shards overlap or have different axes.
    """
    if all(shard == shards[0] for shard in shards):
        return shards[0]
    if len({shard.axis for shard in shards}) > 1:
        raise SplitError(f"{value.name} is read along different axes")
    distinct: list[ShardIndices] = []
    for shard in shards:
        if not any(shard == other for other in distinct):
            distinct.append(shard)
    ordered = sorted(distinct, key=lambda shard: int(shard.indices.min()))
    for section, next_section in zip(ordered, ordered[1:]):
        if section.indices.max() >= next_section.indices.min():
            raise SplitError(f"{value.name} is read in parts that overlap")
    return ShardIndices(ordered[0].axis, np.concatenate([shard.indices for shard in ordered], axis=1))


Dim = int | ir.SymbolicDim
_NUM_TOKENS = 3  # the size of dimensions without a fixed one, while elements are numbered


def reshape_shards(before: Sequence[Dim], after: Sequence[Dim], shard: ShardIndices) -> ShardIndices:
    """Return the shards of a value after a reshape from `before` to `after`.

    Found by reshaping the numbers of elements: an axis fits if each rank's elements are all those at some indices of
    it. Raises SplitError where no axis does.
    """
    old_shape = _sizes(before)
    new_shape = _sizes(after)
    count = math.prod(old_shape)
    if count == math.prod(new_shape):
        old_numbers = np.arange(count).reshape(old_shape)
        new_numbers = np.arange(count).reshape(new_shape)
        elements = [np.take(old_numbers, indices, shard.axis).reshape(-1) for indices in shard.indices]
        for axis, size in enumerate(after):
            # Not an axis of tokens, and none that lies wholly before the split one.
            if not isinstance(size, int) or math.prod(new_shape[: axis + 1]) < math.prod(old_shape[: shard.axis]):
                continue
            # Each index once, in the order of the elements, which is not ascending where shards have several sections.
            indices_of_ranks = []
            for numbers in elements:
                along_axis = np.unravel_index(numbers, new_shape)[axis]
                indices_of_ranks.append(np.array([*dict.fromkeys(along_axis.tolist())]))
            if len({len(indices) for indices in indices_of_ranks}) > 1:
                continue
            selected = [np.take(new_numbers, indices, axis).reshape(-1) for indices in indices_of_ranks]
            if all(map(np.array_equal, selected, elements)):
                return ShardIndices(axis, np.stack(indices_of_ranks))
    raise SplitError(f"a reshape of {list(before)} to {list(after)} does not keep the ranks' parts together")


def _sizes(shape: Sequence[Dim]) -> list[int]:
    """Return a shape with a number for the dimension of the tokens."""
    return [size if isinstance(size, int) else _NUM_TOKENS for size in shape]


@dataclass(frozen=True)
class ShardRules:
    """How the operators of one graph pass shards on."""

    ranks: int

    def input_shards(self, node: ir.Node, output_shards: Mapping[ir.Value, ShardIndices]) -> InputShards:
        """Return (input, shards) of each input that must be split for these outputs. Raises SplitError."""
        result, shard = next(iter(output_shards.items()))
        value = required(node.inputs[0])
        operator = Operator.of(node)
        if node.op_type == "Reshape":
            return [(value, reshape_shards(tuple(shape_of(result)), tuple(shape_of(value)), shard))]
        if node.op_type == "Split":
            return [(value, self._before_split(node, output_shards, operator.axis(0)))]
        if node.op_type == "Slice":
            begin = self._slice_begin(node, shard.axis)
            if begin is not None:
                return [(value, ShardIndices(shard.axis, shard.indices + begin))]
        if node.op_type == "Concat" and operator.axis(0) == shard.axis:
            return self._before_concat(node, shard)
        axes = None
        if node.op_type in _SPLIT:
            axes = axes_of_inputs(operator, shard.axis)
        if axes is None:
            raise SplitError(f"{node.op_type} is not known to be split")
        shards = []
        for operand, axis in zip(node.inputs, axes, strict=True):
            if operand is None or axis is None:
                continue
            # Every rank has all of an operand that is broadcast, and cuts constants itself (`_local_constants`).
            is_broadcast = node.op_type in ELEMENTWISE and len(node.inputs) > 1 and shape_of(operand)[axis] == 1
            if is_broadcast or _is_constant(operand, axis, shard):
                continue
            shards.append((operand, shard.on_axis(axis)))
        if node.op_type not in ELEMENTWISE | {"Concat"} and [operand for operand, _ in shards] != [value]:
            raise SplitError(f"{node.op_type} goes over all of what would be split")
        return shards

    def size(self, value: ir.Value, axis: int) -> int:
        size = shape_of(value)[axis]
        if not isinstance(size, int):
            raise SplitError(f"{value.name} has no fixed size along axis {axis}")
        return size

    def _slice_begin(self, node: ir.Node, shard_axis: int) -> int | None:
        """Return where a slice of an axis begins; None where the axis is not sliced."""
        value = required(node.inputs[0])
        starts, _, axes, *steps = (required(array_of(number)).tolist() for number in node.inputs[1:5])
        for number, (start, axis) in enumerate(zip(starts, axes, strict=True)):
            if axis % len(shape_of(value)) != shard_axis:
                continue
            if steps and steps[0][number] != 1:
                raise SplitError("every other number of what would be split is taken")
            if start < 0:
                start += self.size(value, shard_axis)
            return start
        return None

    def _before_split(self, node: ir.Node, output_shards: Mapping[ir.Value, ShardIndices], axis: int) -> ShardIndices:
        shards = []
        offset = 0
        for output in node.outputs:
            if output not in output_shards:
                raise SplitError(f"{output.name} is not read")
            shard = output_shards[output]
            if shard.axis == axis:
                shard = ShardIndices(axis, shard.indices + offset)
            shards.append(shard)
            offset += self.size(output, axis)
        return merge_shards(required(node.inputs[0]), shards)

    def _before_concat(self, node: ir.Node, shard: ShardIndices) -> InputShards:
        """Return the shards of values that are concatenated along the axis of `shard`."""
        shards = []
        offset = 0
        for value in map(required, node.inputs):
            size = self.size(value, shard.axis)
            is_inside = (shard.indices >= offset) & (shard.indices < offset + size)
            counts = is_inside.sum(axis=1)
            if counts.min() != counts.max() or not counts.min():
                raise SplitError("ranks hold different numbers of the values that are joined")
            indices = shard.indices[is_inside].reshape(self.ranks, -1) - offset
            shards.append((value, ShardIndices(shard.axis, indices)))
            offset += size
        return shards


def _is_constant(value: ir.Value, axis: int, shard: ShardIndices) -> bool:
    """Return whether a value is a constant. Raises SplitError if its values differ by rank: engines are shared."""
    array = array_of(value)
    if array is None:
        return False
    selected = [np.take(array, indices, axis) for indices in shard.indices]
    if any(not np.array_equal(part, selected[0]) for part in selected):
        raise SplitError(f"a constant of {array.shape} differs between the ranks' parts")
    return True
