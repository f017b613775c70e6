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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

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
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, typed_values

_LINEAR_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Neg"}
ValueShards = Mapping[str, ShardIndices]


@dataclass
class Sharding:
    """The shards of values and weights; those without an entry are whole at each rank.

    first_rank_slots: biases of partial sums, which only the first rank adds. partial: values that are partial sums.
    reduced: those of them that are all-reduced.
    """

    values: dict[str, ShardIndices] = field(default_factory=dict)
    weights: dict[str, ShardIndices] = field(default_factory=dict)
    first_rank_slots: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    reduced: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Product:
    """A product value x weight: the axes that its sum runs over, and the axis of result and weight that is the same."""

    value: str
    value_axis: int
    weight: str
    weight_axis: int
    result_axis: int
    weight_result_axis: int


class ShardingFinder:
    """Finds the shards of a graph's values and weights.

    input_shards: of inputs; those without an entry are whole. output_shards: of outputs, where possible; other outputs
    must be whole. Raises InputError for a value of unknown shape.
    """

    def __init__(
        self, graph: Rewriter, slots: Collection[str], input_shards: ValueShards, output_shards: ValueShards, ranks: int
    ):
        self.graph = graph
        self.slots = slots
        self.input_shards = input_shards
        self.output_shards = output_shards
        self.ranks = ranks
        self.shapes = {name: shape for name, (_, shape) in typed_values(graph.model).items()}
        for name, node in graph.producers.items():
            if name not in self.shapes:
                raise InputError(f"tensor_parallel: the shape of {name} ({node.op_type}) is not known")
        self.rules = ShardRules(self.shapes, graph.arrays, ranks)
        self.stacks = {}  # {matrices of the experts that each token chose: the slot of all experts}
        for node in graph.nodes:
            if node.op_type == "GatherND" and node.input[0] in slots:
                self.stacks[node.output[0]] = node.input[0]
        self.products = {}
        for node in graph.nodes:
            product = self._product(node)
            if product is not None:
                self.products[node.output[0]] = product
        self.sharding = Sharding()
        self.whole_reasons: dict[str, str] = {}  # of values that should be split and are not

    def find(self) -> Sharding:
        """Return the sharding. Raises SplitError where an input that is split cannot be used."""
        for group in self._groups():
            self._split(group)
        for name in self.input_shards:
            if name not in self.sharding.values:
                raise SplitError(self.whole_reasons.get(name, f"{name} is read as a whole"))
        self._find_partial_sums()
        return self.sharding

    # -- groups of values that are split together, or not at all

    def _product(self, node: onnx.NodeProto) -> _Product | None:
        if node.op_type == "Gemm" and node.input[1] in self.slots:
            settings = {"transA": 0, "alpha": 1.0, "beta": 1.0, **attributes_of(node)}
            if (settings["transA"], settings["alpha"], settings["beta"]) != (0, 1.0, 1.0):
                return None
            inner, outer = (1, 0) if settings.get("transB") else (0, 1)
            return _Product(node.input[0], 1, node.input[1], inner, 1, outer)
        if node.op_type == "MatMul":
            lhs, rhs = node.input
            rank = len(self.shapes[node.output[0]])
            if lhs in self.stacks and rhs not in self.stacks:
                return _Product(rhs, rank - 2, lhs, rank - 1, rank - 2, rank - 2)
            if rhs in self.stacks or rhs in self.slots:
                last = len(self.shapes[rhs])
                return _Product(lhs, rank - 1, rhs, last - 2, rank - 1, last - 1)
        return None

    def _groups(self) -> list[set[str]]:
        """Return values that operators other than products link, in the order of their first values."""
        parent: dict[str, str] = {}  # union-find

        def root(name: str) -> str:
            while parent.setdefault(name, name) != name:
                name = parent[name]
            return name

        for name in (*self.graph.inputs, *self.graph.outputs):
            if name not in self.slots:
                root(name)
        for node in self.graph.nodes:
            results = [name for name in node.output if name]
            linked: list[str] = []
            if results[0] not in self.products and results[0] not in self.stacks:
                operands = node.input[:1] if node.op_type in ("Gather", "GatherND") else filter(None, node.input)
                linked = [name for name in operands if self._is_value(name) and self._is_worth_splitting(name, node)]
                linked += results
            first = root(results[0])
            for name in results:
                root(name)
            for name in linked:
                parent[root(name)] = first
        groups: dict[str, set[str]] = defaultdict(set)
        for name in parent:
            if self._is_value(name):
                groups[root(name)].add(name)
        return list(groups.values())

    def _is_value(self, name: str) -> bool:
        return name not in self.slots and name not in self.graph.constants and name not in self.stacks

    def _is_worth_splitting(self, name: str, node: onnx.NodeProto) -> bool:
        """Return False for a single number that an element-wise operator broadcasts."""
        return node.op_type not in ELEMENTWISE or self._fixed_size(name) > 1 or self._fixed_size(node.output[0]) == 1

    def _fixed_size(self, name: str) -> int:
        return math.prod(size for size in self.shapes[name] if isinstance(size, int))

    def _split(self, members: set[str]) -> None:
        reads = {name: product for name, product in self.products.items() if product.value in members}
        outputs = [name for name in self.graph.outputs if name in members and name in self.output_shards]
        inputs = [name for name in self.graph.inputs if name in members and name in self.input_shards]
        if not (reads or outputs):
            return
        if not (outputs or inputs) and not all(map(self._reaches_residual, reads)):
            return
        try:
            values, weights = self._propagate(members, reads)
        except UnevenSplitError:
            raise
        except SplitError as reason:
            self.whole_reasons |= dict.fromkeys((*outputs, *inputs), str(reason))
            return
        self.sharding.values |= values
        self.sharding.weights |= weights

    def _reaches_residual(self, result: str) -> bool:
        """Return whether a product is added to the residual stream: otherwise an all-reduce would buy little."""
        visited: set[str] = set()
        stack = [result]
        while stack:
            name = stack.pop()
            if name in visited:
                continue
            visited.add(name)
            if name in self.graph.outputs and name not in self.output_shards:
                return True
            for node in self.graph.consumers.get(name, ()):
                if node.op_type == "Add" and not any(self._is_fixed(operand) for operand in node.input):
                    return True
                if node.op_type in _LINEAR_MOVES | {"Mul", "Div", "ReduceSum", "Add"}:
                    stack += node.output
        return False

    def _is_fixed(self, name: str) -> bool:
        return name in self.slots or name in self.graph.constants

    def _propagate(
        self, members: set[str], reads: Mapping[str, _Product]
    ) -> tuple[dict[str, ShardIndices], dict[str, ShardIndices]]:
        """Return the shards of a group's values and of the weights that make them, going from outputs to inputs.

        reads: {result: product} of the products that read the group.
        """
        reader_shards: dict[str, list[ShardIndices]] = defaultdict(list)
        for name in self.graph.outputs:
            if name in members:
                if name not in self.output_shards:
                    raise SplitError(f"{name} is needed whole")
                reader_shards[name].append(self.output_shards[name])
        values: dict[str, ShardIndices] = {}
        weights: dict[str, ShardIndices] = {}
        uneven: UnevenSplitError | None = None  # raised last: other reasons say more
        for node in reversed(self.graph.nodes):
            product = reads.get(node.output[0])
            if product is not None:
                size = self.rules.size(product.value, product.value_axis)
                input_shard = self._input_shard(product.value, members)
                shard = input_shard or even_shard(product.value_axis, size, self.ranks)
                if shard is None or (input_shard is None and shard.indices.size != size):
                    uneven = UnevenSplitError(f"{product.weight}: {size} inputs do not divide by {self.ranks} ranks")
                    shard = ShardIndices(product.value_axis, np.tile(np.arange(size), (self.ranks, 1)))
                reader_shards[product.value].append(shard)
            for name in node.output:
                if name in members and name in reader_shards:
                    values[name] = merge_shards(name, reader_shards[name])
            output_shards = {name: values[name] for name in node.output if name in values}
            if not output_shards:  # whole: each rank computes it, such as the angles of RoPE
                continue
            for name, shard in self._input_shards(node, output_shards):
                if name in self.slots or name in self.stacks:
                    weight = self.stacks.get(name, name)
                    if weights.setdefault(weight, shard) != shard:
                        raise SplitError(f"{weight} is needed in two ways")
                elif name in members:
                    reader_shards[name].append(shard)
        for name in self.graph.inputs:
            if name not in members:
                continue
            if name in reader_shards:
                values[name] = merge_shards(name, reader_shards[name])
            if name not in self.input_shards or name not in values:
                raise SplitError(f"{name} comes whole")
            if values[name] != self.input_shards[name]:
                raise SplitError(f"{name} is needed in other parts than those that ranks hold")
        for name in values:
            for reader in self.graph.consumers.get(name, ()):
                if reader.output[0] not in values and reader.output[0] not in reads:
                    raise SplitError(f"{name} is read as a whole by {reader.op_type}")
        if uneven is not None:
            raise uneven
        return values, weights

    def _input_shard(self, name: str, members: set[str]) -> ShardIndices | None:
        """Return the shards of a split input that a product reads, directly or as gathered rows."""
        node = self.graph.producers.get(name)
        source = node.input[0] if node is not None and node.op_type == "Gather" else name
        for value in (name, source):
            if value in self.input_shards and value in members:
                return self.input_shards[value]
        return None

    def _input_shards(self, node: onnx.NodeProto, output_shards: ValueShards) -> InputShards:
        product = self.products.get(node.output[0])
        if product is None:
            return self.rules.input_shards(node, output_shards)
        (shard,) = output_shards.values()
        if shard.axis != product.result_axis:
            raise SplitError(f"{node.output[0]} is needed along axis {shard.axis}")
        shards = [(product.weight, shard.on_axis(product.weight_result_axis))]
        if node.op_type == "Gemm":
            for bias in filter(None, node.input[2:]):
                shards.append((bias, shard.on_axis(len(self.shapes[bias]) - 1)))
        return shards

    # -- partial sums

    def _find_partial_sums(self) -> None:
        """Find the partial sums; they are all-reduced where what reads them is whole or not linear."""
        sharding = self.sharding
        nodes = self.graph.nodes
        row_products = {name: product for name, product in self.products.items() if product.value in sharding.values}
        for product in row_products.values():
            weight = self.stacks.get(product.weight, product.weight)
            if weight in sharding.weights:
                raise SplitError(f"{weight} would be split twice")
            sharding.weights[weight] = sharding.values[product.value].on_axis(product.weight_axis)
        reduced: set[str] = set()
        # What follows an all-reduce is no partial sum, which can make further values need one: repeat until stable.
        while True:
            partial: set[str] = set()
            for node in nodes:
                if node.output[0] in row_products or self._keeps_partial(node, partial - reduced):
                    partial.add(node.output[0])
            ends = {name for name in partial if self._ends_partial(name, partial)}
            if ends <= reduced:
                break
            reduced |= ends
        sharding.partial = partial
        for node in nodes:
            sharding.reduced += [name for name in node.output if name in reduced & partial]
            is_product = node.output[0] in row_products
            if node.output[0] in partial and (is_product or node.op_type == "Add"):
                addends = node.input[2:] if is_product else node.input
                sharding.first_rank_slots.update(name for name in addends if name in self.slots)

    def _ends_partial(self, name: str, partial: Collection[str]) -> bool:
        """Return whether a partial sum leaves the graph or is read by a node whose result is not partial."""
        readers = self.graph.consumers.get(name, ())
        return name in self.graph.outputs or any(reader.output[0] not in partial for reader in readers)

    def _keeps_partial(self, node: onnx.NodeProto, partial: Collection[str]) -> bool:
        """Return whether a node may be applied before the all-reduce, as linear operators may."""
        operands = [name for name in node.input if name in partial]
        if not operands:
            return False
        if node.op_type in ("ReduceSum", "Div"):
            return operands == [node.input[0]]
        if node.op_type == "Add":
            return all(name in partial or name in self.slots for name in node.input)
        return node.op_type in _LINEAR_MOVES or (node.op_type == "Mul" and len(operands) == 1)
