"""Split a block into pieces that several ranks run, with an all-reduce of partial sums between them.

In: a canonical block or a batchless graph, and the number of ranks. Out: canonical graphs with a rank's sizes, the same
for every rank, and the shard of each weight that a rank takes. `shard_flow` decides what is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx import NodeProto, helper, numpy_helper

from lockstep.artifacts.graph_files import AttentionVariant
from lockstep.artifacts.tensor_parallel import Shard, attention_shards, heads_divide
from lockstep.errors import InputError
from lockstep.export.canonical import IR_VERSION, OPSET, Graph, canonical_proto
from lockstep.export.cut import INPUT_ORDER, BatchlessGraph
from lockstep.export.shard_flow import Sharding, ShardingFinder
from lockstep.export.shard_parts import ShardIndices, SplitError, even_shard
from lockstep.export.shard_sums import join_sums
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, typed_values, upstream


@dataclass(frozen=True)
class ShardGraph:
    """A graph that each rank runs between two all-reduces; sums: {its partial sum: the sum's name in later pieces}."""

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
    graph = Rewriter(block.proto)
    try:
        sharding = ShardingFinder(graph, slots, input_shards, output_shards, ranks).find()
        joined = join_sums(graph, sharding)
        if joined is not None:
            graph = Rewriter(joined)
            sharding = ShardingFinder(graph, slots, input_shards, output_shards, ranks).find()
        pieces = _PieceCutter(graph, slots, sharding).pieces()
    except SplitError as reason:
        raise InputError(f"tensor_parallel: this model cannot be split over {ranks} ranks: {reason}") from None
    boundary = {*graph.outputs, *(graph.inputs.keys() - slots)}
    values = {name: indices.shard for name, indices in sharding.values.items() if name in boundary}
    weights = {name: indices.shard for name, indices in sharding.weights.items()}
    return Shards(tuple(pieces), values, weights, tuple(sorted(sharding.first_rank_slots)))


def shard_batchless(batchless: BatchlessGraph, attention: AttentionVariant, ranks: int) -> BatchlessGraph:
    """Return the batchless graph of a rank's heads. Raises InputError where the attention cannot be split by heads."""
    input_shards = _attention_indices(attention, ranks)
    del input_shards["attention"]
    graph = Rewriter(_model(ir.to_proto(ir.Model(batchless.graph, ir_version=IR_VERSION)).graph))
    head_sizes = {"query": attention.head_dim, "key": attention.head_dim, "value": attention.value_head_dim}
    output_shards = {}
    for output, (name, size) in zip(graph.outputs, head_sizes.items(), strict=True):
        heads = input_shards[name].indices[:, ::size] // size
        output_shards[output] = ShardIndices(1, heads)
    try:
        sharding = ShardingFinder(graph, (), input_shards, output_shards, ranks).find()
        if sharding.reduced:
            raise SplitError("an attention without weights has sums over heads")
        cutter = _PieceCutter(graph, set(), sharding)
        rank_graph = cutter.graph_of(graph.nodes, list(graph.inputs), list(graph.outputs), {})
    except SplitError as reason:
        raise InputError(f"tensor_parallel: the attention of this model cannot be split: {reason}") from None
    num_heads, num_kv_heads, _ = (indices.count for indices in output_shards.values())
    onnx_graph = ir.from_proto(_model(rank_graph)).graph
    return replace(batchless, graph=onnx_graph, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


class _PieceCutter:
    def __init__(self, graph: Rewriter, slots: set[str], sharding: Sharding):
        self.graph = graph
        self.slots = slots
        self.sharding = sharding
        self.constants = graph.arrays
        self.values = typed_values(graph.model)
        self._tokens_dim = self._named_dim()

    def _named_dim(self) -> str:
        """Return the name of the outputs' leading dimension: num_tokens or num_requests."""
        for name in self.graph.outputs:
            shape = self.values[name][1]
            if shape and isinstance(shape[0], str) and shape[0] != "?":
                return shape[0]
        return "num_tokens"

    def pieces(self) -> list[ShardGraph]:
        """Return the pieces; what depends on positions alone is computed wherever it is read."""
        graph = self.graph
        free_values = {name for name in graph.inputs if name in ("position_ids", "logit_rows")}
        free_values |= {"", *self.constants}
        free_nodes: dict[str, NodeProto] = {}
        sums = {}
        for number, name in enumerate(self.sharding.reduced, 1):
            sums[name] = name if name in graph.outputs else f"sum_{number}"
        # The piece of a value is the number of all-reduces before it.
        piece_of = dict.fromkeys((*graph.inputs, *self.constants), 0)
        nodes_of: list[list[NodeProto]] = [[]]
        for node in graph.nodes:
            if all(name in free_values or name in free_nodes for name in node.input):
                free_nodes.update(dict.fromkeys(node.output, node))
                continue
            piece = max(piece_of[name] + (name in sums) for name in node.input if name and name not in free_nodes)
            piece_of.update(dict.fromkeys(node.output, piece))
            while len(nodes_of) <= piece:
                nodes_of.append([])
            nodes_of[piece].append(node)
        nodes_of = [self._with_free_nodes(nodes, free_nodes) for nodes in nodes_of]
        reads_of = [_inputs_of(nodes) for nodes in nodes_of]
        named = {*graph.inputs, *self.constants, *free_nodes, *sums, *graph.outputs}
        carried: dict[str, str] = {}
        for piece, reads in enumerate(reads_of):
            for name in reads:
                if name not in named and piece_of[name] < piece:
                    carried.setdefault(name, f"kept_{len(carried) + 1}")
        return [self._piece(nodes, reads, sums, carried) for nodes, reads in zip(nodes_of, reads_of, strict=True)]

    def _with_free_nodes(self, nodes: list[NodeProto], free_nodes: Mapping[str, NodeProto]) -> list[NodeProto]:
        """Return `nodes` after those of `free_nodes` that they need."""
        reads = {name for name in _inputs_of(nodes) if name in free_nodes}
        distinct = {id(node): node for node in free_nodes.values()}
        needed = upstream(list(distinct.values()), reads)
        added = []
        for node in self.graph.nodes:
            if node.output[0] in free_nodes and not needed.isdisjoint(node.output):
                added.append(node)
        return added + nodes

    def _piece(
        self, nodes: Sequence[NodeProto], reads: Mapping[str, None], sums: Mapping[str, str], carried: Mapping[str, str]
    ) -> ShardGraph:
        """Return one piece; sums, carried: {value: its name between pieces} of all-reduced and of other values."""
        results = {name for node in nodes for name in node.output}
        inputs = [name for name in reads if name not in results and name not in self.constants]
        rename = {name: sums.get(name) or carried.get(name) or name for name in inputs}
        partial = {name: f"partial_{index}" for index, name in enumerate(sums, 1) if name in results}
        rename |= partial
        rename |= {name: carried[name] for name in results & set(carried)}
        outputs = [name for name in self.graph.outputs if name in results - set(partial)]
        for node in nodes:
            outputs += [name for name in node.output if name in partial or name in carried]
        graph = self.graph_of(nodes, inputs, outputs, rename)
        names = [rename[name] for name in inputs if name not in self.slots]
        order = [name for name in INPUT_ORDER if name in names] + sorted(set(names) - set(INPUT_ORDER))
        slots = {name: name for name in self.slots & set(inputs)}
        sums_of_piece = {name: sums[original] for original, name in partial.items()}
        return ShardGraph(canonical_proto(graph, "shard", order, slots), sums_of_piece)

    def graph_of(
        self, nodes: Sequence[NodeProto], inputs: Sequence[str], outputs: Sequence[str], rename: Mapping[str, str]
    ) -> onnx.GraphProto:
        """Return a rank's graph, its values renamed. Raises SplitError for a value that cannot cross pieces."""
        graph = onnx.GraphProto(name="shard")
        constants = dict(self.constants)
        for node in nodes:
            new = graph.node.add()
            new.CopyFrom(node)
            for position, array in self._local_constants(new).items():
                name = f"{node.name or node.output[0]}/{position}"
                new.input[position:] = [name, *new.input[position + 1 :]]
                constants[name] = np.ascontiguousarray(array)
            new.input[:] = [rename.get(name, name) for name in new.input]
            new.output[:] = [rename.get(name, name) for name in new.output]
        for name in _inputs_of(graph.node):
            if name in constants:
                graph.initializer.append(numpy_helper.from_array(constants[name], name))
        graph.input.extend(self._value_info(name, rename) for name in inputs)
        graph.output.extend(self._value_info(name, rename) for name in outputs)
        return graph

    def _value_info(self, name: str, rename: Mapping[str, str]) -> onnx.ValueInfoProto:
        element = self.values[name][0]
        shape = list(self.values[name][1])
        if name not in self.graph.inputs and name not in self.graph.outputs and not isinstance(shape[0], int):
            shape[0] = self._tokens_dim
        indices = self.sharding.weights.get(name) or self.sharding.values.get(name)
        if indices is not None:
            shape[indices.axis] = indices.count
        if any(size == "?" or (isinstance(size, str) and index) for index, size in enumerate(shape)):
            raise SplitError(f"{name} of shape {shape} would have to be kept between two pieces")
        return helper.make_tensor_value_info(rename.get(name, name), element, shape)

    def _local_constants(self, node: NodeProto) -> dict[int, np.ndarray]:
        """Return the constants that have a rank's sizes instead of the whole ones, by their position in the inputs."""
        shards = {name: self.sharding.values[name] for name in node.output if name in self.sharding.values}
        if not shards:
            return {}
        name, shard = next(iter(shards.items()))
        shape = self.values[name][1]
        if node.op_type in ("Reshape", "Expand"):
            target = self.constants[node.input[1]].copy()
            axis = shard.axis - (len(shape) - len(target))
            if axis >= 0 and target[axis] == shape[shard.axis]:
                target[axis] = shard.count
            return {1: target}
        if node.op_type == "Split":
            return self._local_split(node, shards)
        if node.op_type == "Slice":
            return self._local_slice(node, shard)
        local = {}
        for position, operand in enumerate(node.input):
            if operand in self.constants:
                array = self.constants[operand]
                axis = shard.axis - (len(shape) - array.ndim)
                if axis >= 0 and array.shape[axis] not in (1, shard.count):
                    local[position] = np.take(array, shard.indices[0], axis)
        return local

    def _local_split(self, node: NodeProto, shards: Mapping[str, ShardIndices]) -> dict[int, np.ndarray]:
        axis = attributes_of(node).get("axis", 0) % len(self.values[node.input[0]][1])
        if axis != next(iter(shards.values())).axis:
            return {}
        attributes = [attribute for attribute in node.attribute if attribute.name != "num_outputs"]
        del node.attribute[:]
        node.attribute.extend(attributes)
        return {1: np.array([shards[name].count for name in node.output], np.int64)}

    def _local_slice(self, node: NodeProto, shard: ShardIndices) -> dict[int, np.ndarray]:
        source = self.sharding.values[node.input[0]]
        shape = self.values[node.input[0]][1]
        starts, ends, axes = (self.constants[name].copy() for name in node.input[1:4])
        for position, axis in enumerate(axes.tolist()):
            if axis % len(shape) != shard.axis:
                continue
            offset = int(starts[position])
            if offset < 0:
                offset += shape[shard.axis]  # type: ignore[operator]
            sliced = shard.indices + offset  # [ranks, count]
            begins = set()
            for source_of_rank, sliced_of_rank in zip(source.indices, sliced, strict=True):
                begins.add(int(np.flatnonzero(source_of_rank == sliced_of_rank[0])[0]))
            begin = begins.pop()
            # All ranks run the same graph, so one start must fit them all.
            if begins or not np.array_equal(source.indices[:, begin : begin + shard.count], sliced):
                raise SplitError(f"a slice takes other places of {node.input[0]} at other ranks")
            starts[position] = begin
            ends[position] = begin + shard.count
        return {1: starts, 2: ends}


def _inputs_of(nodes: Sequence[NodeProto]) -> dict[str, None]:
    """Return the names that nodes read, in order."""
    names: dict[str, None] = {}
    for node in nodes:
        names.update((name, None) for name in node.input if name)
    return names
