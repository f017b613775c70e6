"""What an operator needs of its inputs where ranks hold parts of its outputs.

There is a rule for each operator, which goes backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from lockstep.export.shard_parts import NotSplit, ShardIndices, merged, reshaped

_UNARY = {
    "Abs", "Cast", "Cos", "Erf", "Exp", "Gelu", "Identity", "Log", "Neg", "Not", "Reciprocal", "Relu", "Sigmoid", "Sin",
    "Softplus", "Sqrt", "Tanh", "Elu", "LeakyRelu", "HardSigmoid", "Floor",
}  # fmt: skip
BROADCAST = {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Greater", "Less", "And", "Or", "Clip"}
_WITHIN = {"ReduceMean", "ReduceSum", "ReduceMax", "Softmax", "LayerNormalization"}  # of whole vectors along an axis


@dataclass(frozen=True)
class Rules:
    """The rules for the operators of one graph.

    shapes: of every value of the graph, unknown sizes are names. constants: its initializers.
    """

    shapes: Mapping[str, Sequence[int | str]]
    constants: Mapping[str, np.ndarray]
    ranks: int

    def size(self, name: str, axis: int) -> int:
        size = self.shapes[name][axis]
        if not isinstance(size, int):
            raise NotSplit(f"{name} has no fixed size along axis {axis}")
        return size

    def needs(self, node: onnx.NodeProto, found: Mapping[str, ShardIndices]) -> list[tuple[str, ShardIndices]]:
        """Return (input, part) of each input that must be split.

        found: the parts of the node's outputs. Raises NotSplit.
        """
        name, part = next(iter(found.items()))
        if node.op_type in _UNARY:
            return [(node.input[0], part)]
        if node.op_type in BROADCAST:
            return self._needs_broadcast(node, name, part)
        step: Callable[..., list[tuple[str, ShardIndices]]] | None = getattr(
            self, f"_needs_{node.op_type.lower()}", None
        )
        if step is None and node.op_type in _WITHIN:
            step = self._needs_within
        if step is None:
            raise NotSplit(f"{node.op_type} is not known to be split")
        return step(node, found) if node.op_type in ("Split",) else step(node, name, part)

    def _needs_broadcast(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        rank, found = len(self.shapes[name]), []
        for given in node.input:
            if not given:
                continue
            shape = self.shapes[given]
            axis = part.axis - (rank - len(shape))
            if axis < 0 or shape[axis] == 1:
                continue
            if given in self.constants:
                self._check_constant(given, axis, part)
                continue
            found.append((given, part.at(axis)))
        return found

    def _check_constant(self, name: str, axis: int, part: ShardIndices) -> None:
        """Check that a constant looks the same to each rank.

        Engines are the same at all ranks. Raises NotSplit.
        """
        taken = [np.take(self.constants[name], indices, axis) for indices in part.indices]
        if any(not np.array_equal(each, taken[0]) for each in taken):
            raise NotSplit(f"a constant of {self.constants[name].shape} differs between the ranks' parts")

    def _needs_within(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        given = node.input[0]
        rank = len(self.shapes[given])
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type in ("Softmax", "LayerNormalization"):
            start = attributes.get("axis", -1) % rank
            axes = [start] if node.op_type == "Softmax" else list(range(start, rank))
        else:
            taken = self.constants[node.input[1]].tolist() if len(node.input) > 1 else attributes.get("axes", [])
            axes = [axis % rank for axis in taken]
        axis = part.axis
        if not attributes.get("keepdims", 1) and node.op_type.startswith("Reduce"):
            left = [index for index in range(rank) if index not in axes]
            axis = left[part.axis]
        if axis in axes or not axes:
            raise NotSplit(f"{node.op_type} goes over all of what would be split")
        # Gains and biases lie along the axes that are whole.
        return [(given, part.at(axis))]

    def _needs_reshape(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        given = node.input[0]
        return [(given, reshaped(self.shapes[name], self.shapes[given], part))]

    def _needs_transpose(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        (order,) = [helper.get_attribute_value(a) for a in node.attribute if a.name == "perm"]
        return [(node.input[0], part.at(order[part.axis]))]

    def _needs_unsqueeze(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        rank = len(self.shapes[name])
        added = {axis % rank for axis in self.constants[node.input[1]].tolist()}
        if part.axis in added:
            raise NotSplit("an axis of one number is needed in parts")
        return [(node.input[0], part.at(part.axis - sum(axis < part.axis for axis in added)))]

    def _needs_squeeze(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        rank = len(self.shapes[node.input[0]])
        taken = {axis % rank for axis in self.constants[node.input[1]].tolist()}
        left = [axis for axis in range(rank) if axis not in taken]
        return [(node.input[0], part.at(left[part.axis]))]

    def _needs_expand(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        given = node.input[0]
        axis = part.axis - (len(self.shapes[name]) - len(self.shapes[given]))
        if axis < 0 or self.shapes[given][axis] == 1:
            raise NotSplit("copies of a value are needed in parts")
        return [(given, part.at(axis))]

    def _needs_gather(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 0)
        if axis != 0 or part.axis == 0 or len(self.shapes[node.input[1]]) != 1:
            raise NotSplit("Gather takes from what would be split")
        return [(node.input[0], part)]

    def _needs_slice(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        given = node.input[0]
        starts, _, axes, steps = (self.constants[each].tolist() for each in node.input[1:5])
        rank = len(self.shapes[given])
        for start, axis, step in zip(starts, axes, steps, strict=True):
            if axis % rank == part.axis:
                if step != 1:
                    raise NotSplit("every other number of what would be split is taken")
                begin = start if start >= 0 else start + self.size(given, part.axis)
                return [(given, part.at(part.axis, part.indices + begin))]
        return [(given, part)]

    def _needs_split(self, node: onnx.NodeProto, found: Mapping[str, ShardIndices]) -> list[tuple[str, ShardIndices]]:
        axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 0)
        given = node.input[0]
        axis %= len(self.shapes[given])
        wants, offset = [], 0
        for name in node.output:
            if name not in found:
                raise NotSplit(f"{name} is not read")
            part = found[name]
            wants.append(part.at(axis, part.indices + offset) if part.axis == axis else part)
            offset += self.size(name, axis)
        return [(given, merged(given, wants))]

    def _needs_concat(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> list[tuple[str, ShardIndices]]:
        (axis,) = [helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"]
        if axis % len(self.shapes[name]) != part.axis:
            return [(given, part) for given in node.input]
        found, offset = [], 0
        for given in node.input:
            size = self.size(given, part.axis)
            inside = (part.indices >= offset) & (part.indices < offset + size)
            counts = inside.sum(axis=1)
            if counts.min() != counts.max() or not counts.min():
                raise NotSplit("ranks hold different numbers of what is joined")
            found.append((given, part.at(part.axis, part.indices[inside].reshape(self.ranks, -1) - offset)))
            offset += size
        return found
