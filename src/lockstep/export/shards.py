"""Split a block into pieces that several ranks run, with an all-reduce of partial sums between them.

In: a canonical block or a batchless graph, and the number of ranks. Out: canonical graphs with a rank's sizes, the same
for every rank, and the shard of each weight that a rank takes. `shard_flow` decides what is split.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.artifacts.graph_files import AttentionVariant
from lockstep.artifacts.tensor_parallel import Shard, attention_shards, heads_divide
from lockstep.errors import InputError
from lockstep.export.canonical import IR_VERSION, OPSET, Graph, canonical
from lockstep.export.cut import INPUT_ORDER, BatchlessGraph
from lockstep.export.shard_flow import Sharding, ShardingFinder
from lockstep.export.shard_parts import ShardIndices, SplitError, even_shard
from lockstep.export.shard_sums import JoinSums
from lockstep.onnx_tools.toolkit import GraphWriter, change
from lockstep.onnx_tools.values import array_of, attribute, number, required, shape_of, upstream


@dataclass(frozen=True)
class ShardGraph:
    """A graph that each rank runs between two all-reduces; sums: {its partial sum: the name of the all-reduced one}."""

    graph: Graph
    sums: Mapping[str, str]


@dataclass(frozen=True)
class Shards:
    """A block in pieces, for several ranks.

    values: shards of its inputs and outputs; those without an entry are whole. weights: shards of its slots.
    first_rank_slots: slots that the first rank takes whole, while the others take zeros.
    """

    pieces: tuple[ShardGraph, ...]
    values: Mapping[str, Shard]
    weights: Mapping[str, Shard]
    first_rank_slots: tuple[str, ...]


def _attention_indices(attention: AttentionVariant, ranks: int) -> dict[str, ShardIndices]:
    """Return the shards of query, key, value and attention, [num_tokens, heads * head_dim].

    With fewer key and value heads than ranks, several ranks have the same head. Raises InputError for heads that do not
    divide.
    """
    if not heads_divide(attention.num_heads, attention.num_kv_heads, ranks):
        raise InputError(
            f"tensor_parallel: expected a divisor of the {attention.num_heads} attention heads, and a divisor or a "
            f"multiple of the {attention.num_kv_heads} key and value heads, found {ranks}"
        )
    shards = attention_shards(attention, ranks)
    return {name: ShardIndices.from_shard(shards[name]) for name in ("query", "key", "value", "attention")}


def shard_block(block: Graph, before: AttentionVariant | None, after: AttentionVariant | None, ranks: int) -> Shards:
    """Split a block into pieces for `ranks` ranks.

    before, after: the attentions around the block; None where there is none. Raises InputError where its input or its
    weights cannot be split.
    """
    slots = {slot.name for slot in block.signature.slots}
    # A block reads the output of the attention before it, and makes the inputs of the one after it.
    input_shards = {}
    if before is not None:
        input_shards["attention"] = _attention_indices(before, ranks)["attention"]
    output_shards = {}
    if after is not None:
        output_shards = _attention_indices(after, ranks)
        del output_shards["attention"]
    for output in block.signature.outputs:
        if output.name == "logits":
            logits_shard = even_shard(1, int(output.shape[1]), ranks)
            if logits_shard is not None:
                output_shards["logits"] = logits_shard
    model = ir.from_proto(block.proto)
    try:
        sharding = ShardingFinder(model, slots, input_shards, output_shards, ranks).find()
        # Joining sums changes the graph, so shards are found again.
        if change(model, JoinSums(sharding)):
            sharding = ShardingFinder(model, slots, input_shards, output_shards, ranks).find()
        pieces = _PieceCutter(model.graph, slots, sharding).pieces()
    except SplitError as reason:
        raise InputError(f"tensor_parallel: this model cannot be split over {ranks} ranks: {reason}") from None
    boundary = {*model.graph.outputs, *(value for value in model.graph.inputs if value.name not in slots)}
    values = {str(value.name): indices.shard for value, indices in sharding.values.items() if value in boundary}
    weights = {str(value.name): indices.shard for value, indices in sharding.weights.items()}
    first_rank_slots = sorted(str(value.name) for value in sharding.first_rank_slots)
    return Shards(tuple(pieces), values, weights, tuple(first_rank_slots))


def shard_batchless(batchless: BatchlessGraph, attention: AttentionVariant, ranks: int) -> BatchlessGraph:
    """Return the batchless graph of a rank's heads. Raises InputError where the attention cannot be split by heads."""
    input_shards = _attention_indices(attention, ranks)
    del input_shards["attention"]
    model = ir.Model(batchless.graph, ir_version=IR_VERSION).clone()
    model.opset_imports[""] = OPSET
    graph = model.graph
    head_sizes = {"query": attention.head_dim, "key": attention.head_dim, "value": attention.value_head_dim}
    output_shards = {}
    for output, (name, size) in zip(graph.outputs, head_sizes.items(), strict=True):
        heads = input_shards[name].indices[:, ::size] // size
        output_shards[str(output.name)] = ShardIndices(1, heads)
    try:
        sharding = ShardingFinder(model, (), input_shards, output_shards, ranks).find()
        if sharding.reduced:
            raise SplitError("an attention without weights has sums over heads")
        rank_graph = _PieceCutter(graph, set(), sharding).graph_of([*graph], graph.inputs, graph.outputs, {})
    except SplitError as reason:
        raise InputError(f"tensor_parallel: the attention of this model cannot be split: {reason}") from None
    num_heads, num_kv_heads, _ = (indices.count for indices in output_shards.values())
    return replace(batchless, graph=rank_graph, num_heads=num_heads, num_kv_heads=num_kv_heads)


class _PieceCutter:
    """Cuts a graph, whose types are inferred, into pieces between all-reduces."""

    def __init__(self, graph: ir.Graph, slots: set[str], sharding: Sharding):
        self.graph = graph
        self.slots = slots
        self.sharding = sharding
        # Inference may lose the name of the leading dimension of values between pieces. It is that of the outputs.
        self._tokens_dim = "num_tokens"
        for value in reversed(graph.outputs):
            shape = shape_of(value)
            if len(shape) and not isinstance(shape[0], int) and shape[0].value is not None:
                self._tokens_dim = shape[0].value

    def pieces(self) -> list[ShardGraph]:
        """Return the pieces; values that depend on positions alone are computed wherever they are read."""
        graph = self.graph
        free = {value for value in graph.inputs if value.name in ("position_ids", "logit_rows")}
        free_nodes: dict[ir.Value, ir.Node] = {}
        sums = {}
        for index, value in enumerate(self.sharding.reduced, 1):
            sums[value] = f"sum_{index}"
            if value.is_graph_output():
                sums[value] = str(value.name)
        # The piece of a value is the number of all-reduces before it.
        piece_of = dict.fromkeys(graph.inputs, 0)
        nodes_of: list[list[ir.Node]] = [[]]
        for node in graph:
            operands = [value for value in node.inputs if value is not None and not value.is_initializer()]
            if all(value in free or value in free_nodes for value in operands):
                free_nodes.update(dict.fromkeys(node.outputs, node))
                continue
            piece = max(piece_of[value] + (value in sums) for value in operands if value not in free_nodes)
            piece_of.update(dict.fromkeys(node.outputs, piece))
            while len(nodes_of) <= piece:
                nodes_of.append([])
            nodes_of[piece].append(node)
        for piece, nodes in enumerate(nodes_of):
            needed = upstream(value for value in _reads_of(nodes) if value in free_nodes)
            added = [node for node in dict.fromkeys(free_nodes.values()) if not needed.isdisjoint(node.outputs)]
            nodes_of[piece] = added + nodes
        named = {*graph.inputs, *free_nodes, *sums, *graph.outputs}
        carried: dict[ir.Value, str] = {}
        for piece, nodes in enumerate(nodes_of):
            for value in _reads_of(nodes):
                if value not in named and piece_of[value] < piece:
                    carried.setdefault(value, f"kept_{len(carried) + 1}")
        return [self._piece(nodes, sums, carried) for nodes in nodes_of]

    def _piece(
        self, nodes: Sequence[ir.Node], sums: Mapping[ir.Value, str], carried: Mapping[ir.Value, str]
    ) -> ShardGraph:
        """Return one piece.

        sums, carried: {value: its name between pieces}, of values that are all-reduced after a piece, and of others.
        """
        results = set(itertools.chain.from_iterable(node.outputs for node in nodes))
        inputs = [value for value in _reads_of(nodes) if value not in results]
        names = {value: sums.get(value) or carried.get(value) or str(value.name) for value in inputs}
        # A rank's result is a summand, and has a name other than the sum: the all-reduce after the piece writes that.
        partial = {value: f"partial_{index}" for index, value in enumerate(sums, 1) if value in results}
        result_names = partial | {value: carried[value] for value in results.intersection(carried)}
        outputs = [value for value in self.graph.outputs if value in results and value not in partial]
        for node in nodes:
            outputs += [value for value in node.outputs if value in result_names]
        graph = self.graph_of(nodes, inputs, outputs, names | result_names)
        # Inputs in a fixed order, so that equal pieces of different layers have the same bytes.
        read = {names[value] for value in inputs if value.name not in self.slots}
        order = [name for name in INPUT_ORDER if name in read] + sorted(read - set(INPUT_ORDER))
        slots = {name: name for name in self.slots & set(names.values())}
        sums_of_piece = {name: sums[original] for original, name in partial.items()}
        return ShardGraph(canonical(graph, "shard", order, slots), sums_of_piece)

    def graph_of(
        self,
        nodes: Sequence[ir.Node],
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        names: Mapping[ir.Value, str],
    ) -> ir.Graph:
        """Return a rank's graph, with other names. Raises SplitError for a value that cannot cross pieces."""
        copies = {value: ir.Value(name=names.get(value, value.name)) for value in inputs}
        graph = ir.Graph([*copies.values()], [], nodes=[], opset_imports={"": OPSET}, name="shard")
        writer = GraphWriter(graph)
        for node in nodes:
            attributes: dict[str, Any] = dict(node.attributes)
            operands: list[Any] = []
            for value in node.inputs:
                operands.append(copies[value] if value in copies else array_of(value))
            for position, array in self._local_constants(node).items():
                operands[position:] = [np.ascontiguousarray(array), *operands[position + 1 :]]
                if node.op_type == "Split":  # it has either sizes or a number of outputs
                    attributes.pop("num_outputs", None)
            results = [names.get(value, value.name) for value in node.outputs]
            settings = {"results": results, "name": node.name, "domain": node.domain, **attributes}
            copies.update(zip(node.outputs, writer.several(node.op_type, *operands, **settings), strict=True))
        graph.outputs.extend(copies[value] for value in outputs)
        for value in (*inputs, *outputs):
            copies[value].type = value.type
            copies[value].shape = self._shape(value)
        return graph

    def _shape(self, value: ir.Value) -> ir.Shape:
        """Return a rank's shape of a value that enters or leaves a piece."""
        shape: list[int | str | None] = []
        for size in shape_of(value):
            shape.append(size if isinstance(size, int) else size.value)
        if not value.is_graph_input() and not value.is_graph_output() and not isinstance(shape[0], int):
            shape[0] = self._tokens_dim
        indices = self.sharding.weights.get(value) or self.sharding.values.get(value)
        if indices is not None:
            shape[indices.axis] = indices.count
        if any(size is None or (isinstance(size, str) and index) for index, size in enumerate(shape)):
            raise SplitError(f"{value.name} of shape {shape} would have to be kept between two pieces")
        return ir.Shape(shape)

    def _local_constants(self, node: ir.Node) -> dict[int, np.ndarray]:
        """Return {position in the inputs: constant with a rank's sizes} of a node: shapes, sizes, biases."""
        shards = {value: self.sharding.values[value] for value in node.outputs if value in self.sharding.values}
        if not shards:
            return {}
        result, shard = next(iter(shards.items()))
        shape = shape_of(result)
        if node.op_type in ("Reshape", "Expand"):
            # The target may have fewer dimensions than the result, to which it is aligned at the last one.
            target = required(array_of(node.inputs[1])).copy()
            axis = shard.axis - (len(shape) - len(target))
            if axis >= 0 and target[axis] == shape[shard.axis]:
                target[axis] = shard.count
            return {1: target}
        if node.op_type == "Split":
            axis = attribute(node, "axis", 0) % len(shape_of(node.inputs[0]))
            if axis != shard.axis:
                return {}
            return {1: np.array([shards[value].count for value in node.outputs], np.int64)}
        if node.op_type == "Slice":
            return self._local_slice(node, shard)
        local = {}
        for position, operand in enumerate(node.inputs):
            array = array_of(operand)
            if array is not None:
                axis = shard.axis - (len(shape) - array.ndim)
                # Not of 1, which is broadcast, and not of a rank's size already. All ranks take the first one's part:
                # the finder made sure that they are equal.
                if axis >= 0 and array.shape[axis] not in (1, shard.count):
                    local[position] = np.take(array, shard.indices[0], axis)
        return local

    def _local_slice(self, node: ir.Node, shard: ShardIndices) -> dict[int, np.ndarray]:
        sliced_value = required(node.inputs[0])
        source = self.sharding.values[sliced_value]
        shape = shape_of(sliced_value)
        starts, ends, axes = (required(array_of(numbers)).copy() for numbers in node.inputs[1:4])
        for position, axis in enumerate(axes.tolist()):
            if axis % len(shape) != shard.axis:
                continue
            offset = int(starts[position])
            if offset < 0:
                offset += number(shape[shard.axis])
            sliced = shard.indices + offset  # [ranks, count]
            begins = set()
            for source_of_rank, sliced_of_rank in zip(source.indices, sliced, strict=True):
                begins.add(int(np.flatnonzero(source_of_rank == sliced_of_rank[0])[0]))
            # All ranks run the same graph, so one start must fit them all.
            begin = begins.pop()
            if begins or not np.array_equal(source.indices[:, begin : begin + shard.count], sliced):
                raise SplitError(f"a slice takes other places of {sliced_value.name} at other ranks")
            starts[position] = begin
            ends[position] = begin + shard.count
        return {1: starts, 2: ends}


def _reads_of(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    values: dict[ir.Value, None] = {}
    for node in nodes:
        values.update((value, None) for value in node.inputs if value is not None and not value.is_initializer())
    return [*values]
