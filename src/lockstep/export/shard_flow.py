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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from lockstep.errors import InputError
from lockstep.export.axes import ELEMENTWISE
from lockstep.export.shard_parts import Needs, NotSplit, Operators, ShardIndices, Uneven, even, merged
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, typed_values

_LINEAR_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Neg"}
Parts = Mapping[str, ShardIndices]


@dataclass
class Flow:
    """What ranks hold of values and weights; those that are not named are whole at each.

    rows: weights of row-parallel products. first: weights that only the first rank adds, the others zeros. partial:
    values that are partial sums. summed: those of them that are added over the ranks.
    """

    held: dict[str, ShardIndices] = field(default_factory=dict)
    weights: dict[str, ShardIndices] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    first: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    summed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Product:
    """A product value x weight: the axes that its sum runs over, and those of result and weight that are the same."""

    value: str
    value_axis: int
    weight: str
    weight_axis: int
    result_axis: int
    weight_result_axis: int


class FlowFinder:
    """Finds what ranks hold of a graph's values and weights.

    given: what ranks hold of inputs; those that are not named are whole. wanted: of outputs, where it can be had; other
    outputs must be whole. Raises InputError for a value of unknown shape.
    """

    def __init__(self, graph: Rewriter, slots: Collection[str], given: Parts, wanted: Parts, ranks: int):
        self.graph = graph
        self.slots = slots
        self.given = given
        self.wanted = wanted
        self.ranks = ranks
        self.shapes = {name: shape for name, (_, shape) in typed_values(graph.model).items()}
        for name, node in graph.producers.items():
            if name not in self.shapes:
                raise InputError(f"tensor_parallel: the shape of {name} ({node.op_type}) is not known")
        self.operators = Operators(self.shapes, graph.arrays, ranks)
        self.stacks = {  # a stack of weights of which each token takes some: its experts
            node.output[0]: node.input[0]
            for node in graph.nodes
            if node.op_type == "GatherND" and node.input[0] in slots
        }
        products = {node.output[0]: self._product(node) for node in graph.nodes}
        self.products = {name: product for name, product in products.items() if product is not None}
        self.flow = Flow()
        self.whole: dict[str, str] = {}  # why a value is whole, though a split one was asked for

    def find(self) -> Flow:
        """Return what is found. Raises NotSplit where an input that is split cannot be used."""
        for group in self._groups():
            self._split(group)
        for name in self.given:
            if name not in self.flow.held:
                raise NotSplit(self.whole.get(name, f"{name} is read as a whole"))
        self._partial_sums()
        return self.flow

    # -- groups of values that are split together, or not at all

    def _product(self, node: onnx.NodeProto) -> _Product | None:
        if node.op_type == "Gemm" and node.input[1] in self.slots:
            settings = {"transA": 0, "alpha": 1.0, "beta": 1.0, **attributes_of(node)}
            if (settings["transA"], settings["alpha"], settings["beta"]) != (0, 1.0, 1.0):
                return None
            inner, outer = (1, 0) if settings.get("transB") else (0, 1)
            return _Product(node.input[0], 1, node.input[1], inner, 1, outer)
        if node.op_type == "MatMul":
            left, right = node.input
            rank = len(self.shapes[node.output[0]])
            if left in self.stacks and right not in self.stacks:
                return _Product(right, rank - 2, left, rank - 1, rank - 2, rank - 2)
            if right in self.stacks or right in self.slots:
                last = len(self.shapes[right])
                return _Product(left, rank - 1, right, last - 2, rank - 1, last - 1)
        return None

    def _groups(self) -> list[set[str]]:
        """Return values that operators other than products link, in the order of their first values."""
        parent: dict[str, str] = {}

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
                linked = [name for name in operands if self._is_value(name) and self._is_wide(name, node)]
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

    def _is_wide(self, name: str, node: onnx.NodeProto) -> bool:
        """Return whether an operand is worth splitting: no single number beside values that are wider."""
        numbers, results = (
            math.prod(size for size in self.shapes[value] if isinstance(size, int)) for value in (name, node.output[0])
        )
        return node.op_type not in ELEMENTWISE or numbers > 1 or results == 1

    def _split(self, members: set[str]) -> None:
        reads = {name: product for name, product in self.products.items() if product.value in members}
        asked = [name for name in self.graph.outputs if name in members and name in self.wanted]
        known = [name for name in self.graph.inputs if name in members and name in self.given]
        if not (reads or asked):
            return
        if not (asked or known) and not all(map(self._reaches_residual, reads)):
            return
        try:
            held, weights = self._propagate(members, reads)
        except Uneven:
            raise
        except NotSplit as reason:
            self.whole |= dict.fromkeys((*asked, *known), str(reason))
            return
        self.flow.held |= held
        self.flow.weights |= weights

    def _reaches_residual(self, result: str) -> bool:
        """Return whether a product is added to the residual stream: else a sum would buy little."""
        seen: set[str] = set()
        stack = [result]
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.graph.outputs and name not in self.wanted:
                return True
            for node in self.graph.consumers.get(name, ()):
                if node.op_type == "Add" and not any(
                    other in self.slots or other in self.graph.constants for other in node.input
                ):
                    return True
                if node.op_type in _LINEAR_MOVES | {"Mul", "Div", "ReduceSum", "Add"}:
                    stack += node.output
        return False

    def _propagate(
        self, members: set[str], reads: Mapping[str, _Product]
    ) -> tuple[dict[str, ShardIndices], dict[str, ShardIndices]]:
        """Go from what is asked for back to the sources of a group; reads: the products that read it, by result."""
        wants: dict[str, list[ShardIndices]] = defaultdict(list)
        for name in self.graph.outputs:
            if name in members:
                if name not in self.wanted:
                    raise NotSplit(f"{name} is needed whole")
                wants[name].append(self.wanted[name])
        held: dict[str, ShardIndices] = {}
        weights: dict[str, ShardIndices] = {}
        uneven: Uneven | None = None  # said once nothing else is in the way
        for node in reversed(self.graph.nodes):
            product = reads.get(node.output[0])
            if product is not None:
                size = self.operators.size(product.value, product.value_axis)
                given = self._given_for(product.value, members)
                part = given or even(product.value_axis, size, self.ranks)
                if part is None or (given is None and part.indices.size != size):
                    uneven = Uneven(f"{product.weight}: {size} inputs do not divide by {self.ranks} ranks")
                    part = ShardIndices(product.value_axis, np.tile(np.arange(size), (self.ranks, 1)))
                wants[product.value].append(part)
            held |= {name: merged(name, wants[name]) for name in node.output if name in members and name in wants}
            parts = {name: held[name] for name in node.output if name in held}
            # Without any it is whole: each rank computes it, such as the angles of RoPE.
            for name, part in self._needs(node, parts) if parts else ():
                if name in self.slots or name in self.stacks:
                    weight = self.stacks.get(name, name)
                    if weights.setdefault(weight, part) != part:
                        raise NotSplit(f"{weight} is needed in two ways")
                elif name in members:
                    wants[name].append(part)
        for name in self.graph.inputs:
            if name not in members:
                continue
            if name in wants:
                held[name] = merged(name, wants[name])
            if name not in self.given or name not in held:
                raise NotSplit(f"{name} comes whole")
            if held[name] != self.given[name]:
                raise NotSplit(f"{name} is needed in other parts than those that ranks hold")
        for name in held:
            for reader in self.graph.consumers.get(name, ()):
                if reader.output[0] not in held and reader.output[0] not in reads:
                    raise NotSplit(f"{name} is read as a whole by {reader.op_type}")
        if uneven is not None:
            raise uneven
        return held, weights

    def _given_for(self, name: str, members: set[str]) -> ShardIndices | None:
        """Return what a split input means for the product that reads it, itself or picked rows of it."""
        node = self.graph.producers.get(name)
        source = node.input[0] if node is not None and node.op_type == "Gather" else name
        return next((self.given[key] for key in (name, source) if key in self.given and key in members), None)

    def _needs(self, node: onnx.NodeProto, parts: Parts) -> Needs:
        product = self.products.get(node.output[0])
        if product is None:
            return self.operators.needs(node, parts)
        (part,) = parts.values()
        if part.axis != product.result_axis:
            raise NotSplit(f"{node.output[0]} is needed along axis {part.axis}")
        bias = node.input[2:] if node.op_type == "Gemm" else []
        of_bias = [(name, part.at(len(self.shapes[name]) - 1)) for name in filter(None, bias)]
        return [(product.weight, part.at(product.weight_result_axis)), *of_bias]

    # -- partial sums

    def _partial_sums(self) -> None:
        """Find the partial sums; they are summed over the ranks where what reads them is whole or not linear."""
        flow = self.flow
        nodes = self.graph.nodes
        rows = {name: product for name, product in self.products.items() if product.value in flow.held}
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
            for node in nodes:
                if node.output[0] in rows or self._keeps_partial(node, partial - summed):
                    partial.add(node.output[0])
            ends = {
                name
                for name in partial
                if name in self.graph.outputs
                or any(reader.output[0] not in partial for reader in self.graph.consumers.get(name, ()))
            }
            if ends <= summed:
                break
            summed |= ends
        flow.partial = partial
        flow.summed = [name for node in nodes for name in node.output if name in summed & partial]
        for node in nodes:
            if node.output[0] in partial and (node.output[0] in rows or node.op_type == "Add"):
                operands = node.input[2:] if node.output[0] in rows else node.input
                flow.first |= {name for name in operands if name in self.slots}

    def _keeps_partial(self, node: onnx.NodeProto, partial: Collection[str]) -> bool:
        """Return whether a node may be applied before the sum over ranks, as linear operators may."""
        operands = [name for name in node.input if name in partial]
        if not operands:
            return False
        if node.op_type in ("ReduceSum", "Div"):
            return operands == [node.input[0]]
        if node.op_type == "Add":
            return all(name in partial or name in self.slots for name in node.input)
        return node.op_type in _LINEAR_MOVES or (node.op_type == "Mul" and len(operands) == 1)
