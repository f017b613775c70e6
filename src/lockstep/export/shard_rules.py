"""What an operator needs of its inputs where ranks hold parts of its outputs.

There is a rule for each operator, which goes backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from lockstep.export.shard_parts import NotSplit, ShardIndices, merged, reshaped
from lockstep.onnx_tools.rewriter import Dims, attributes_of

_UNARY = {
    "Abs", "Cast", "Cos", "Erf", "Exp", "Gelu", "Identity", "Log", "Neg", "Not", "Reciprocal", "Relu", "Sigmoid", "Sin",
    "Softplus", "Sqrt", "Tanh", "Elu", "LeakyRelu", "HardSigmoid", "Floor",
}  # fmt: skip
BROADCAST = {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Greater", "Less", "And", "Or", "Clip"}
_ALONG_AXIS = {"Softmax", "LayerNormalization"}  # along it, or along it and all that follow
_WITHIN = {"ReduceMean", "ReduceSum", "ReduceMax", *_ALONG_AXIS}  # of whole vectors along an axis
Needs = list[tuple[str, ShardIndices]]


@dataclass(frozen=True)
class Rules:
    """The rules for the operators of one graph; shapes: of its values; constants: its initializers."""

    shapes: Mapping[str, Dims]
    constants: Mapping[str, np.ndarray]
    ranks: int

    def size(self, name: str, axis: int) -> int:
        size = self.shapes[name][axis]
        if not isinstance(size, int):
            raise NotSplit(f"{name} has no fixed size along axis {axis}")
        return size

    def needs(self, node: onnx.NodeProto, parts: Mapping[str, ShardIndices]) -> Needs:
        """Return (input, part) of each input that must be split; parts: of the outputs. Raises NotSplit."""
        name, part = next(iter(parts.items()))
        if node.op_type in _UNARY:
            return [(node.input[0], part)]
        if node.op_type in BROADCAST:
            return self._needs_broadcast(node, name, part)
        if node.op_type in _WITHIN:
            return self._needs_within(node, part)
        if node.op_type == "Split":
            return self._needs_split(node, parts)
        rule: Callable[[onnx.NodeProto, str, ShardIndices], Needs] | None
        rule = getattr(self, f"_needs_{node.op_type.lower()}", None)
        if rule is None:
            raise NotSplit(f"{node.op_type} is not known to be split")
        return rule(node, name, part)

    def _axes(self, node: onnx.NodeProto, of: str) -> list[int]:
        return [axis % len(self.shapes[of]) for axis in self.constants[node.input[1]].tolist()]

    def _needs_broadcast(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        rank, needs = len(self.shapes[name]), []
        for value in filter(None, node.input):
            shape = self.shapes[value]
            axis = part.axis - (rank - len(shape))
            if axis < 0 or shape[axis] == 1:
                continue
            if value not in self.constants:
                needs.append((value, part.at(axis)))
                continue
            taken = [np.take(self.constants[value], indices, axis) for indices in part.indices]
            if any(not np.array_equal(other, taken[0]) for other in taken):  # engines are the same at all ranks
                raise NotSplit(f"a constant of {self.constants[value].shape} differs between the ranks' parts")
        return needs

    def _needs_within(self, node: onnx.NodeProto, part: ShardIndices) -> Needs:
        (value, *rest), attributes = node.input, attributes_of(node)
        rank, axis = len(self.shapes[value]), part.axis
        if node.op_type in _ALONG_AXIS:
            start = attributes.get("axis", -1) % rank
            axes = [start] if node.op_type == "Softmax" else list(range(start, rank))
        else:
            axes = self._axes(node, value) if rest else [number % rank for number in attributes.get("axes", [])]
            if not attributes.get("keepdims", 1):
                axis = [index for index in range(rank) if index not in axes][axis]
        if axis in axes or not axes:
            raise NotSplit(f"{node.op_type} goes over all of what would be split")
        return [(value, part.at(axis))]  # gains and biases lie along the axes that are whole

    def _needs_reshape(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        return [(node.input[0], reshaped(self.shapes[name], self.shapes[node.input[0]], part))]

    def _needs_transpose(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        return [(node.input[0], part.at(attributes_of(node)["perm"][part.axis]))]

    def _needs_unsqueeze(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        added = set(self._axes(node, name))
        if part.axis in added:
            raise NotSplit("an axis of one number is needed in parts")
        return [(node.input[0], part.at(part.axis - sum(axis < part.axis for axis in added)))]

    def _needs_squeeze(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        taken = self._axes(node, node.input[0])
        left = [axis for axis in range(len(self.shapes[node.input[0]])) if axis not in taken]
        return [(node.input[0], part.at(left[part.axis]))]

    def _needs_expand(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        shape = self.shapes[node.input[0]]
        axis = part.axis - (len(self.shapes[name]) - len(shape))
        if axis < 0 or shape[axis] == 1:
            raise NotSplit("copies of a value are needed in parts")
        return [(node.input[0], part.at(axis))]

    def _needs_gather(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        if attributes_of(node).get("axis", 0) or part.axis == 0 or len(self.shapes[node.input[1]]) != 1:
            raise NotSplit("Gather takes from what would be split")
        return [(node.input[0], part)]

    def _needs_slice(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        value = node.input[0]
        starts, _, axes, steps = (self.constants[other].tolist() for other in node.input[1:5])
        for start, axis, step in zip(starts, axes, steps, strict=True):
            if axis % len(self.shapes[value]) == part.axis:
                if step != 1:
                    raise NotSplit("every other number of what would be split is taken")
                begin = start if start >= 0 else start + self.size(value, part.axis)
                return [(value, part.at(part.axis, part.indices + begin))]
        return [(value, part)]

    def _needs_split(self, node: onnx.NodeProto, parts: Mapping[str, ShardIndices]) -> Needs:
        value = node.input[0]
        axis = attributes_of(node).get("axis", 0) % len(self.shapes[value])
        wants, offset = [], 0
        for name in node.output:
            if name not in parts:
                raise NotSplit(f"{name} is not read")
            part = parts[name]
            wants.append(part.at(axis, part.indices + offset) if part.axis == axis else part)
            offset += self.size(name, axis)
        return [(value, merged(value, wants))]

    def _needs_concat(self, node: onnx.NodeProto, name: str, part: ShardIndices) -> Needs:
        if attributes_of(node)["axis"] % len(self.shapes[name]) != part.axis:
            return [(value, part) for value in node.input]
        needs, offset = [], 0
        for value in node.input:
            size = self.size(value, part.axis)
            inside = (part.indices >= offset) & (part.indices < offset + size)
            counts = inside.sum(axis=1)
            if counts.min() != counts.max() or not counts.min():
                raise NotSplit("ranks hold different numbers of what is joined")
            needs.append((value, part.at(part.axis, part.indices[inside].reshape(self.ranks, -1) - offset)))
            offset += size
        return needs
