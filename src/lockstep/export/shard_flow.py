"""Decide by data flow which weights of a block are split over ranks, and where partial sums are all-reduced.

In: a canonical block, or the rotary part of an attention, and the shards of its inputs and outputs. Out: the shards of
each value and each weight. A product whose weight is split by its outputs (column parallel) gives a rank its columns;
such a value may only reach element-wise operators, operators within a head, data movement, or a product over just these
numbers (row parallel), which gives a partial sum. Partial sums pass through linear operators and are all-reduced where
something else reads them. Reference: Megatron-LM, Shoeybi et al. 2019.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from lockstep.errors import InputError
from lockstep.export.axes import ELEMENTWISE
from lockstep.export.shard_parts import (
    InputShards,
    ShardIndices,
    ShardRules,
    SplitError,
    UnevenSplitError,
    even_shard,
    merge_shards,
)
from lockstep.onnx_tools.toolkit import infer_types
from lockstep.onnx_tools.values import attribute, maker, required, shape_of

_LINEAR_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Neg"}
NamedShards = Mapping[str, ShardIndices]  # of inputs and outputs


@dataclass
class Sharding:
    """The shards of values and weights; those without an entry are whole at each rank.

    first_rank_slots: biases of partial sums, which only the first rank adds. partial: values that are partial sums.
    reduced: those of them that are all-reduced.
    """

    values: dict[ir.Value, ShardIndices] = field(default_factory=dict)
    weights: dict[ir.Value, ShardIndices] = field(default_factory=dict)
    first_rank_slots: set[ir.Value] = field(default_factory=set)
    partial: set[ir.Value] = field(default_factory=set)
    reduced: list[ir.Value] = field(default_factory=list)


@dataclass(frozen=True)
class _Product:
    """A product value x weight.

    value_axis, weight_axis: those that its sum runs over. result_axis, weight_result_axis: the axis of the result that
    is one of the weight's.
    """

    value: ir.Value
    value_axis: int
    weight: ir.Value
    weight_axis: int
    result_axis: int
    weight_result_axis: int


class ShardingFinder:
    """Finds the shards of a graph's values and weights.

    input_shards: of inputs; those without an entry are whole. output_shards: of outputs, where possible; other outputs
    must be whole. Raises InputError for a value of unknown shape.
    """

    def __init__(
        self, model: ir.Model, slots: Collection[str], input_shards: NamedShards, output_shards: NamedShards, ranks: int
    ):
        self.graph = model.graph
        self.slots = {value for value in model.graph.inputs if value.name in slots}
        self.input_shards = _of_values(model.graph.inputs, input_shards)
        self.output_shards = _of_values(model.graph.outputs, output_shards)
        self.ranks = ranks
        infer_types(model)
        for node in model.graph:
            for value in node.outputs:
                if value.shape is None:
                    raise InputError(f"tensor_parallel: the shape of {value.name} ({node.op_type}) is not known")
        self.rules = ShardRules(ranks)
        self.stacks: dict[ir.Value, ir.Value] = {}  # {matrices that each token chose: the slot of all experts}
        for node in model.graph:
            if node.op_type == "GatherND" and node.inputs[0] in self.slots:
                self.stacks[node.outputs[0]] = required(node.inputs[0])
        self.products: dict[ir.Value, _Product] = {}
        for node in model.graph:
            product = self._product(node)
            if product is not None:
                self.products[node.outputs[0]] = product
        self.sharding = Sharding()
        self.whole_reasons: dict[ir.Value, str] = {}  # of values that should be split and are not

    def find(self) -> Sharding:
        """Return the sharding. Raises SplitError where an input that is split cannot be used."""
        for group in self._groups():
            self._split(group)
        for value in self.input_shards:
            if value not in self.sharding.values:
                raise SplitError(self.whole_reasons.get(value, f"{value.name} is read as a whole"))
        self._find_partial_sums()
        return self.sharding

    # Groups of values that are split together, or not at all

    def _product(self, node: ir.Node) -> _Product | None:
        if node.op_type == "Gemm" and node.inputs[1] in self.slots:
            settings = [attribute(node, name, default) for name, default in (("transA", 0), ("alpha", 1), ("beta", 1))]
            if settings != [0, 1, 1]:
                return None
            inner = int(bool(attribute(node, "transB", 0)))
            return _Product(required(node.inputs[0]), 1, required(node.inputs[1]), inner, 1, 1 - inner)
        if node.op_type == "MatMul":
            lhs, rhs = map(required, node.inputs)
            rank = len(shape_of(node.outputs[0]))
            if lhs in self.stacks and rhs not in self.stacks:
                return _Product(rhs, rank - 2, lhs, rank - 1, rank - 2, rank - 2)
            if rhs in self.stacks or rhs in self.slots:
                last = len(shape_of(rhs))
                return _Product(lhs, rank - 1, rhs, last - 2, rank - 1, last - 1)
        return None

    def _groups(self) -> list[set[ir.Value]]:
        """Return values that operators other than products link, in the order of their first values."""
        parent: dict[ir.Value, ir.Value] = {}  # union-find

        def root(value: ir.Value) -> ir.Value:
            while parent.setdefault(value, value) is not value:
                value = parent[value]
            return value

        for value in (*self.graph.inputs, *self.graph.outputs):
            if value not in self.slots:
                root(value)
        for node in self.graph:
            linked: list[ir.Value] = []
            if node.outputs[0] not in self.products and node.outputs[0] not in self.stacks:
                operands = node.inputs
                if node.op_type in ("Gather", "GatherND"):  # indices are no parts of what they select
                    operands = node.inputs[:1]
                for operand in operands:
                    if operand is not None and self._is_value(operand) and _is_worth_splitting(operand, node):
                        linked.append(operand)
                linked += node.outputs
            first = root(node.outputs[0])
            for value in node.outputs:  # those that nothing links are groups of one
                root(value)
            for value in linked:
                parent[root(value)] = first
        groups: dict[ir.Value, set[ir.Value]] = defaultdict(set)
        for value in parent:
            if self._is_value(value):
                groups[root(value)].add(value)
        return list(groups.values())

    def _is_value(self, value: ir.Value) -> bool:
        return not self._is_fixed(value) and value not in self.stacks

    def _is_fixed(self, value: ir.Value | None) -> bool:
        return value is not None and (value in self.slots or value.is_initializer())

    def _split(self, members: set[ir.Value]) -> None:
        products = {value: product for value, product in self.products.items() if product.value in members}
        outputs = [value for value in self.output_shards if value in members]
        inputs = [value for value in self.input_shards if value in members]
        if not (products or outputs):  # nothing would be computed less
            return
        if not (outputs or inputs) and not all(map(self._reaches_residual, products)):
            return
        try:
            values, weights = self._propagate(members, products)
        except UnevenSplitError:
            raise
        except SplitError as reason:
            self.whole_reasons |= dict.fromkeys((*outputs, *inputs), str(reason))
            return
        self.sharding.values |= values
        self.sharding.weights |= weights

    def _reaches_residual(self, result: ir.Value) -> bool:
        """Return whether a product is added to the residual stream: otherwise an all-reduce would buy little."""
        visited: set[ir.Value] = set()
        stack = [result]
        while stack:
            value = stack.pop()
            if value in visited:
                continue
            visited.add(value)
            if value.is_graph_output() and value not in self.output_shards:
                return True
            for node in value.consumers():
                if node.op_type == "Add" and not any(map(self._is_fixed, node.inputs)):
                    return True
                if node.op_type in _LINEAR_MOVES | {"Mul", "Div", "ReduceSum", "Add"}:
                    stack += node.outputs
        return False

    def _propagate(
        self, members: set[ir.Value], products: Mapping[ir.Value, _Product]
    ) -> tuple[dict[ir.Value, ShardIndices], dict[ir.Value, ShardIndices]]:
        """Return the shards of a group's values and of the weights that make them, going from outputs to inputs.

        products: {result: product} of the products that read the group.
        """
        reader_shards: dict[ir.Value, list[ShardIndices]] = defaultdict(list)
        for value in self.graph.outputs:
            if value in members:
                if value not in self.output_shards:
                    raise SplitError(f"{value.name} is needed whole")
                reader_shards[value].append(self.output_shards[value])
        values: dict[ir.Value, ShardIndices] = {}
        weights: dict[ir.Value, ShardIndices] = {}
        uneven: UnevenSplitError | None = None  # raised last: other reasons say more
        for node in reversed(self.graph):
            product = products.get(node.outputs[0])
            if product is not None:
                size = self.rules.size(product.value, product.value_axis)
                input_shard = self._input_shard(product.value, members)
                shard = input_shard or even_shard(product.value_axis, size, self.ranks)
                # Each input of the product at exactly one rank: otherwise the all-reduce would add it twice.
                if shard is None or (input_shard is None and shard.indices.size != size):
                    uneven = UnevenSplitError(
                        f"{product.weight.name}: {size} inputs do not divide by {self.ranks} ranks"
                    )
                    shard = ShardIndices(product.value_axis, np.tile(np.arange(size), (self.ranks, 1)))
                reader_shards[product.value].append(shard)
            for value in node.outputs:
                if value in members and value in reader_shards:
                    values[value] = merge_shards(value, reader_shards[value])
            output_shards = {value: values[value] for value in node.outputs if value in values}
            if not output_shards:  # whole: each rank computes it, such as the angles of RoPE
                continue
            for value, shard in self._input_shards(node, output_shards):
                if value in self.slots or value in self.stacks:
                    weight = self.stacks.get(value, value)
                    if weights.setdefault(weight, shard) != shard:
                        raise SplitError(f"{weight.name} is needed in two ways")
                elif value in members:
                    reader_shards[value].append(shard)
        for value in self.graph.inputs:
            if value not in members:
                continue
            if value in reader_shards:
                values[value] = merge_shards(value, reader_shards[value])
            if value not in self.input_shards or value not in values:
                raise SplitError(f"{value.name} comes whole")
            if values[value] != self.input_shards[value]:
                raise SplitError(f"{value.name} is needed in other parts than those that ranks hold")
        for value in values:
            for reader in value.consumers():
                if reader.outputs[0] not in values and reader.outputs[0] not in products:
                    raise SplitError(f"{value.name} is read as a whole by {reader.op_type}")
        if uneven is not None:
            raise uneven
        return values, weights

    def _input_shard(self, value: ir.Value, members: set[ir.Value]) -> ShardIndices | None:
        """Return the shards of a split input that a product reads, directly or as gathered rows."""
        sources = [value]
        if (gather := maker(value, "Gather")) is not None:
            sources.append(required(gather.inputs[0]))
        for source in sources:
            if source in self.input_shards and source in members:
                return self.input_shards[source]
        return None

    def _input_shards(self, node: ir.Node, output_shards: Mapping[ir.Value, ShardIndices]) -> InputShards:
        product = self.products.get(node.outputs[0])
        if product is None:
            return self.rules.input_shards(node, output_shards)
        (shard,) = output_shards.values()  # a product has one output
        if shard.axis != product.result_axis:
            raise SplitError(f"{node.outputs[0].name} is needed along axis {shard.axis}")
        shards = [(product.weight, shard.on_axis(product.weight_result_axis))]
        if node.op_type == "Gemm":
            for bias in node.inputs[2:]:
                if bias is not None:
                    shards.append((bias, shard.on_axis(len(shape_of(bias)) - 1)))
        return shards

    # -- partial sums

    def _find_partial_sums(self) -> None:
        """Find the partial sums; they are all-reduced where what reads them is whole or not linear."""
        sharding = self.sharding
        row_products = {value: product for value, product in self.products.items() if product.value in sharding.values}
        for product in row_products.values():
            weight = self.stacks.get(product.weight, product.weight)
            if weight in sharding.weights:
                raise SplitError(f"{weight.name} would be split twice")
            sharding.weights[weight] = sharding.values[product.value].on_axis(product.weight_axis)
        reduced: set[ir.Value] = set()
        # What follows an all-reduce is no partial sum, which can make further values need one: repeat until stable.
        while True:
            partial: set[ir.Value] = set()
            for node in self.graph:
                if node.outputs[0] in row_products or self._keeps_partial(node, partial - reduced):
                    partial.add(node.outputs[0])
            ends = {value for value in partial if _ends_partial(value, partial)}
            if ends <= reduced:
                break
            reduced |= ends
        sharding.partial = partial
        for node in self.graph:
            sharding.reduced += [value for value in node.outputs if value in reduced & partial]
            # A bias of a partial sum would be added by each rank.
            addends: Sequence[ir.Value | None] = ()
            if node.outputs[0] in row_products:
                addends = node.inputs[2:]
            elif node.outputs[0] in partial and node.op_type == "Add":
                addends = node.inputs
            sharding.first_rank_slots.update(self.slots.intersection(map(required, addends)))

    def _keeps_partial(self, node: ir.Node, partial: Collection[ir.Value]) -> bool:
        """Return whether a node may be applied before the all-reduce, as linear operators may."""
        operands = [value for value in node.inputs if value in partial]
        if not operands:
            return False
        if node.op_type in ("ReduceSum", "Div"):
            return operands == [node.inputs[0]]
        if node.op_type == "Add":
            return all(value in partial or value in self.slots for value in node.inputs)
        return node.op_type in _LINEAR_MOVES or (node.op_type == "Mul" and len(operands) == 1)


def _of_values(values: Sequence[ir.Value], shards: NamedShards) -> dict[ir.Value, ShardIndices]:
    return {value: shards[str(value.name)] for value in values if value.name in shards}


def _is_worth_splitting(value: ir.Value, node: ir.Node) -> bool:
    """Return False for a single number that an element-wise operator broadcasts."""
    return node.op_type not in ELEMENTWISE or _fixed_size(value) > 1 or _fixed_size(node.outputs[0]) == 1


def _fixed_size(value: ir.Value) -> int:
    return math.prod(size for size in shape_of(value) if isinstance(size, int))


def _ends_partial(value: ir.Value, partial: Collection[ir.Value]) -> bool:
    """Return whether a partial sum leaves the graph or is read by a node whose result is not partial."""
    return value.is_graph_output() or any(reader.outputs[0] not in partial for reader in value.consumers())
