"""The split of a block's weights over ranks, decided by data flow.

It tells which weights may be split, and where their partial sums are added.

In: a canonical block, or the rotary part of an attention, and what a rank holds of its inputs and outputs. Out: for
each value and each weight what a rank holds of it. A product whose weight is split by its outputs (column parallel)
gives a rank its columns; such a value may only meet element-wise operators, operators within a head, data movement, or
a product over just these numbers (row parallel), which gives a partial sum. Partial sums pass through linear
operators, and are added over the ranks where something else reads them. Reference: Megatron-LM, Shoeybi et al. 2019.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.errors import InputError
from lockstep.export.shard_parts import NotSplit, ShardIndices, Uneven, even, merged
from lockstep.export.shard_rules import BROADCAST, Rules

_LINEAR_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Neg"}


@dataclass
class Flow:
    """What ranks hold of values and weights.

    Those that are not named are whole at each.

    rows: weights of row-parallel products. first: weights that only the first rank adds, the others zeros. partial:
    values that are partial sums. summed: those of them that are added over the ranks. whole: {value: why it is whole,
    though a split one was asked for}.
    """

    held: dict[str, ShardIndices] = field(default_factory=dict)
    weights: dict[str, ShardIndices] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    first: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    summed: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list[int | str]] = field(default_factory=dict)


def find_flow(
    model: onnx.ModelProto,
    slots: Iterable[str],
    given: Mapping[str, ShardIndices],
    wanted: Mapping[str, ShardIndices],
    ranks: int,
) -> Flow:
    """Find what ranks hold of a graph's values and weights.

    given: what ranks hold of inputs; those that are not named are whole. wanted: of outputs, where it can be had; other
    outputs must be whole. Raises NotSplit where an input that is split cannot be used.
    """
    return _Finder(model, set(slots), dict(given), dict(wanted), ranks).find()


@dataclass(frozen=True)
class _Product:
    """A product value x weight.

    It has the axes that the sum runs over, and the axes of result and weight that are the same.
    """

    node: onnx.NodeProto
    value: str
    value_axis: int
    weight: str
    weight_axis: int
    result_axis: int
    weight_result_axis: int


class _Finder:
    def __init__(
        self,
        model: onnx.ModelProto,
        slots: set[str],
        given: dict[str, ShardIndices],
        wanted: dict[str, ShardIndices],
        ranks: int,
    ):
        self.graph, self.slots, self.given, self.wanted, self.ranks = model.graph, slots, given, wanted, ranks
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.graph.initializer}
        self.shapes = shapes_of(model)
        self.rules = Rules(self.shapes, self.constants, ranks)
        self.producer = {output: node for node in self.graph.node for output in node.output if output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                self.readers[name].append(node)
        self.outputs = [value.name for value in self.graph.output]
        self.stacks = {  # a stack of weights of which each token takes some: its experts
            node.output[0]: node.input[0]
            for node in self.graph.node
            if node.op_type == "GatherND" and node.input[0] in slots
        }
        self.products = {node.output[0]: made for node in self.graph.node if (made := self._product(node)) is not None}
        self.flow = Flow(shapes=self.shapes)

    def find(self) -> Flow:
        groups = self._groups()
        for group in groups:
            self._split(group)
        for name in self.given:
            if name not in self.flow.held:
                raise NotSplit(self.flow.whole.get(name, f"{name} is read as a whole"))
        self._partial_sums()
        return self.flow

    # -- groups of values that are split together, or not at all

    def _product(self, node: onnx.NodeProto) -> _Product | None:
        if node.op_type == "Gemm" and node.input[1] in self.slots:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1:
                return None
            inner, outer = (1, 0) if attributes.get("transB", 0) else (0, 1)
            return _Product(node, node.input[0], 1, node.input[1], inner, 1, outer)
        if node.op_type == "MatMul":
            left, right = node.input
            rank = len(self.shapes[node.output[0]])
            if left in self.stacks and right not in self.stacks:
                return _Product(node, right, rank - 2, left, rank - 1, rank - 2, rank - 2)
            if right in self.stacks | dict.fromkeys(self.slots):
                last = len(self.shapes[right])
                return _Product(node, left, rank - 1, right, last - 2, rank - 1, last - 1)
        return None

    def _groups(self) -> list[list[str]]:
        """Return values that operators other than products link.

        Groups are in the order of their first values.
        """
        parent: dict[str, str] = {}

        def root(name: str) -> str:
            while parent.setdefault(name, name) != name:
                name = parent[name]
            return name

        for value in (*self.graph.input, *self.graph.output):
            if value.name not in self.slots:
                root(value.name)
        for node in self.graph.node:
            if node.output[0] in self.products or node.output[0] in self.stacks:
                for name in node.output:
                    root(name)
                continue
            given = node.input[:1] if node.op_type in ("Gather", "GatherND") else node.input
            linked = [name for name in given if name and self._is_value(name) and self._is_wide(name, node)]
            first = root(node.output[0])
            for name in (*linked, *(output for output in node.output if output)):
                parent[root(name)] = first
        found: dict[str, list[str]] = defaultdict(list)
        for name in parent:
            if self._is_value(name):
                found[root(name)].append(name)
        return list(found.values())

    def _is_value(self, name: str) -> bool:
        return name not in self.slots and name not in self.constants and name not in self.stacks

    def _is_wide(self, name: str, node: onnx.NodeProto) -> bool:
        """Return whether an operand is worth splitting.

        One number a token, which any rank can know, is not, beside values that are wider.
        """
        if node.op_type not in BROADCAST:
            return True
        numbers, results = (
            math.prod(size for size in self.shapes[value] if isinstance(size, int)) for value in (name, node.output[0])
        )
        return numbers > 1 or results == 1

    def _split(self, group: list[str]) -> None:
        members = set(group)
        reads = [product for product in self.products.values() if product.value in members]
        outputs = [name for name in self.outputs if name in members]
        inputs = [value.name for value in self.graph.input if value.name in members]
        asked = [name for name in outputs if name in self.wanted]
        if not (reads or asked) or (
            not asked
            and not any(name in self.given for name in inputs)
            and not all(self._reaches_residual(product) for product in reads)
        ):
            return
        try:
            held, weights = self._propagate(members, reads, outputs, inputs)
        except Uneven:
            raise
        except NotSplit as reason:
            for name in (*asked, *(name for name in inputs if name in self.given)):
                self.flow.whole[name] = str(reason)
            return
        self.flow.held |= held
        self.flow.weights |= weights

    def _reaches_residual(self, product: _Product) -> bool:
        """Return whether a product's result is added to the residual stream.

        Behind linear operators alone: where a norm or another product follows, a sum over the ranks would buy little.
        """
        seen: set[str] = set()
        stack = [product.node.output[0]]
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.outputs and name not in self.wanted:
                return True
            for node in self.readers[name]:
                if node.op_type == "Add" and not set(node.input) & (self.slots | set(self.constants)):
                    return True
                if node.op_type in _LINEAR_MOVES | {"Mul", "Div", "ReduceSum", "Add"}:
                    stack += node.output
        return False

    def _propagate(
        self, members: set[str], reads: Sequence[_Product], outputs: Sequence[str], inputs: Sequence[str]
    ) -> tuple[dict[str, ShardIndices], dict[str, ShardIndices]]:
        """Go from what is asked for back to where the values of the group come from."""
        wants: dict[str, list[ShardIndices]] = defaultdict(list)
        for name in outputs:
            if name not in self.wanted:
                raise NotSplit(f"{name} is needed whole")
            wants[name].append(self.wanted[name])
        reading = {product.node.output[0]: product for product in reads}
        held: dict[str, ShardIndices] = {}
        weights: dict[str, ShardIndices] = {}
        uneven: Uneven | None = None  # said once nothing else is in the way
        for node in reversed(self.graph.node):
            product = reading.get(node.output[0])
            if product is not None:
                size = self.rules.size(product.value, product.value_axis)
                given = self._given_for(product.value, members)
                part = given or even(product.value_axis, size, self.ranks)
                if part is None or (given is None and part.indices.size != size):
                    uneven = Uneven(f"{product.weight}: {size} inputs do not divide by {self.ranks} ranks")
                    part = ShardIndices(product.value_axis, np.tile(np.arange(size), (self.ranks, 1)))
                wants[product.value].append(part)
            made = [name for name in node.output if name in members]
            if not made:
                continue
            for name in made:
                if name in wants:
                    held[name] = merged(name, wants[name])
            found = {name: held[name] for name in made if name in held}
            if not found:
                continue  # whole: each rank computes it, such as the angles of RoPE
            for name, part in self._needs(node, found):
                if name in self.slots or name in self.stacks:
                    weight = self.stacks.get(name, name)
                    if weights.setdefault(weight, part) != part:
                        raise NotSplit(f"{weight} is needed in two ways")
                elif name in members:
                    wants[name].append(part)
        for name in inputs:
            if name in wants:
                held[name] = merged(name, wants[name])
            if name not in self.given or name not in held:
                raise NotSplit(f"{name} comes whole")
            if held[name] != self.given[name]:
                raise NotSplit(f"{name} is needed in other parts than those that ranks hold")
        for name in held:
            for reader in self.readers[name]:
                if reader.output[0] not in held and reader.output[0] not in reading:
                    raise NotSplit(f"{name} is read as a whole by {reader.op_type}")
        if uneven is not None:
            raise uneven
        return held, weights

    def _given_for(self, name: str, members: set[str]) -> ShardIndices | None:
        """Return what a split input means for the product that reads it.

        The product reads it through movement alone.
        """
        for given, part in self.given.items():
            if given in members:
                if name == given:
                    return part
                node = self.producer.get(name)
                if node is not None and node.op_type == "Gather" and node.input[0] == given:
                    return part
        return None

    def _needs(self, node: onnx.NodeProto, found: Mapping[str, ShardIndices]) -> list[tuple[str, ShardIndices]]:
        product = self.products.get(node.output[0])
        if product is None:
            return self.rules.needs(node, found)
        (part,) = found.values()
        return self._product_needs(node, product, part)

    def _product_needs(
        self, node: onnx.NodeProto, product: _Product, part: ShardIndices
    ) -> list[tuple[str, ShardIndices]]:
        if part.axis != product.result_axis:
            raise NotSplit(f"{node.output[0]} is needed along axis {part.axis}")
        found = [(product.weight, part.at(product.weight_result_axis))]
        if node.op_type == "Gemm" and len(node.input) == 3 and node.input[2]:
            found.append((node.input[2], part.at(len(self.shapes[node.input[2]]) - 1)))
        return found

    # -- partial sums

    def _partial_sums(self) -> None:
        """Find the partial sums, and those of them that are summed over the ranks.

        All are summed that something reads which is not linear, or which is whole.
        """
        flow = self.flow
        rows = {p.node.output[0]: p for p in self.products.values() if p.value in flow.held}
        for product in rows.values():
            weight = self.stacks.get(product.weight, product.weight)
            part = flow.held[product.value].at(product.weight_axis)
            if weight in flow.weights:
                raise NotSplit(f"{weight} would be split twice")
            flow.weights[weight] = part
            flow.rows.add(weight)
        summed: set[str] = set()
        while True:
            partial: set[str] = set()
            for node in self.graph.node:
                if node.output[0] in rows or self._keeps_partial(node, partial - summed):
                    partial.add(node.output[0])
            found = {
                name
                for name in partial
                if name in self.outputs or any(reader.output[0] not in partial for reader in self.readers[name])
            }
            if found <= summed:
                break
            summed |= found
        flow.partial, flow.summed = (
            partial,
            [name for node in self.graph.node for name in node.output if name in summed & partial],
        )
        for node in self.graph.node:
            if node.output[0] in partial and (node.output[0] in rows or node.op_type == "Add"):
                operands = node.input[2:] if node.output[0] in rows else node.input
                flow.first |= {given for given in operands if given in self.slots}

    def _keeps_partial(self, node: onnx.NodeProto, partial: Collection[str]) -> bool:
        """Return whether a node may be applied before the sum over ranks.

        So it is where the sum of what it makes of partial sums is what it makes of their sum.
        """
        found = [given for given in node.input if given in partial]
        if not found:
            return False
        if node.op_type in _LINEAR_MOVES:
            return True
        if node.op_type in ("ReduceSum", "Div"):
            return found == [node.input[0]]
        if node.op_type == "Mul":
            return len(found) == 1
        if node.op_type == "Add":
            return all(given in partial or given in self.slots for given in node.input)
        return False


def shapes_of(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    """Return the shape of each value, weight and constant.

    Unknown sizes are "?". Raises InputError where there is no shape.
    """
    inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True).graph
    found: dict[str, list[int | str]] = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        found[value.name] = [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
            for dim in value.type.tensor_type.shape.dim
        ]
    for node in inferred.node:
        for name in node.output:
            if name and name not in found:
                raise InputError(f"tensor_parallel: the shape of {name} ({node.op_type}) is not known")
    return found
