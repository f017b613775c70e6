"""Cut a block into pieces for several ranks, between which partial sums are added.

In: a canonical block or a batchless graph, and the number of ranks. Out: canonical graphs with a rank's sizes, the same
for every rank, and which part of each weight a rank takes. `shard_flow` decides what is split.
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
from lockstep.export.shard_flow import Flow, FlowFinder
from lockstep.export.shard_parts import NotSplit, ShardIndices, even
from lockstep.export.shard_sums import join_sums
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, typed_values, upstream


@dataclass(frozen=True)
class ShardGraph:
    """A graph that each rank runs between two sums; sums: {partial sum that it gives: its name for later pieces}."""

    graph: Graph
    sums: Mapping[str, str]


@dataclass(frozen=True)
class Shards:
    """A block in pieces, for several ranks.

    values: what ranks hold of its inputs and outputs; those that are not named are whole. weights: what they take of
    its slots. first: slots of which all but the first rank take zeros.
    """

    pieces: tuple[ShardGraph, ...]
    values: Mapping[str, Shard]
    weights: Mapping[str, Shard]
    first: tuple[str, ...]


def _held(attention: AttentionVariant, ranks: int) -> dict[str, ShardIndices]:
    """Return what a rank holds of query, key, value and attention, [num_tokens, heads * head_dim].

    Key and value heads of which there are fewer than ranks are held by several. Raises InputError for heads that do
    not divide.
    """
    if not heads_divide(attention.num_heads, attention.num_kv_heads, ranks):
        raise InputError(
            f"tensor_parallel: expected a divisor of the {attention.num_heads} attention heads, and a divisor or a "
            f"multiple of the {attention.num_kv_heads} key and value heads, found {ranks}"
        )
    shards = attention_shards(attention, ranks)
    return {name: ShardIndices.of(shards[name]) for name in ("query", "key", "value", "attention")}


def shard_block(block: Graph, before: AttentionVariant | None, behind: AttentionVariant | None, ranks: int) -> Shards:
    """Cut a block into pieces for `ranks` ranks.

    before, behind: the attentions around the block; None: there is none. Raises InputError where its input or its
    weights cannot be split.
    """
    slots = {slot.name for slot in block.signature.slots}
    given = {"attention": _held(before, ranks)["attention"]} if before else {}
    wanted = {name: part for name, part in (_held(behind, ranks) if behind else {}).items() if name != "attention"}
    for output in block.signature.outputs:
        if output.name == "logits" and (part := even(1, int(output.shape[1]), ranks)) is not None:
            wanted["logits"] = part
    graph = Rewriter(block.proto)
    try:
        flow = FlowFinder(graph, slots, given, wanted, ranks).find()
        if (joined := join_sums(graph, flow)) is not None:
            graph = Rewriter(joined)
            flow = FlowFinder(graph, slots, given, wanted, ranks).find()
        pieces = _Cutter(graph, slots, flow).pieces()
    except NotSplit as reason:
        raise InputError(f"tensor_parallel: this model cannot be split over {ranks} ranks: {reason}") from None
    values = {
        name: part for name, part in flow.held.items() if name in graph.outputs or name in graph.inputs.keys() - slots
    }
    held, weights = ({name: part.shard for name, part in parts.items()} for parts in (values, flow.weights))
    return Shards(tuple(pieces), held, weights, tuple(sorted(flow.first)))


def shard_batchless(batchless: BatchlessGraph, attention: AttentionVariant, ranks: int) -> BatchlessGraph:
    """Return a rank's part of the batchless graph of an attention. Raises InputError where that is none by heads."""
    given = {name: part for name, part in _held(attention, ranks).items() if name != "attention"}
    graph = Rewriter(_model(ir.to_proto(ir.Model(batchless.graph, ir_version=IR_VERSION)).graph))
    sizes = {"query": attention.head_dim, "key": attention.head_dim, "value": attention.value_head_dim}
    wanted = {
        output: ShardIndices(1, given[name].indices[:, ::size] // size)
        for output, (name, size) in zip(graph.outputs, sizes.items(), strict=True)
    }
    try:
        flow = FlowFinder(graph, (), given, wanted, ranks).find()
        if flow.summed:
            raise NotSplit("an attention without weights has sums over heads")
        part = _Cutter(graph, set(), flow).graph_of(graph.nodes, list(graph.inputs), list(graph.outputs), {})
    except NotSplit as reason:
        raise InputError(f"tensor_parallel: the attention of this model cannot be split: {reason}") from None
    num_heads, num_kv_heads, _ = (part.count for part in wanted.values())
    return replace(batchless, graph=ir.from_proto(_model(part)).graph, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


class _Cutter:
    def __init__(self, graph: Rewriter, slots: set[str], flow: Flow):
        self.graph = graph
        self.slots = slots
        self.flow = flow
        self.constants = graph.arrays
        self.values = typed_values(graph.model)
        first = [shape[0] for name in graph.outputs if (shape := self.values[name][1])]
        self._tokens = next((size for size in first if isinstance(size, str) and size != "?"), "num_tokens")

    def pieces(self) -> list[ShardGraph]:
        """Return the pieces; what depends on positions alone is computed wherever it is read."""
        graph = self.graph
        anywhere = {name for name in graph.inputs if name in ("position_ids", "logit_rows")} | {"", *self.constants}
        free: dict[str, NodeProto] = {}
        summed = {name: name if name in graph.outputs else f"sum_{n}" for n, name in enumerate(self.flow.summed, 1)}
        level = dict.fromkeys((*graph.inputs, *self.constants), 0)
        at: list[list[NodeProto]] = [[]]
        for node in graph.nodes:
            if all(name in anywhere or name in free for name in node.input):
                free.update(dict.fromkeys(node.output, node))
                continue
            here = max(level[name] + (name in summed) for name in node.input if name and name not in free)
            level.update(dict.fromkeys(node.output, here))
            at += [[] for _ in range(here + 1 - len(at))]
            at[here].append(node)
        at = [self._with_free(nodes, free) for nodes in at]
        reads_of = [dict.fromkeys(name for node in nodes for name in node.input if name) for nodes in at]
        known = {*graph.inputs, *self.constants, *free, *summed, *graph.outputs}
        kept: dict[str, str] = {}
        for index, reads in enumerate(reads_of):
            for name in reads:
                if name not in known and level[name] < index:
                    kept.setdefault(name, f"kept_{len(kept) + 1}")
        return [self._piece(nodes, reads, summed, kept) for nodes, reads in zip(at, reads_of, strict=True)]

    def _with_free(self, nodes: list[NodeProto], free: Mapping[str, NodeProto]) -> list[NodeProto]:
        """Return `nodes`, and before them what they need of `free`."""
        read = {name for node in nodes for name in node.input if name in free}
        needed = upstream(list({id(node): node for node in free.values()}.values()), read)
        used = [node for node in self.graph.nodes if node.output[0] in free and not needed.isdisjoint(node.output)]
        return used + nodes

    def _piece(
        self, nodes: Sequence[NodeProto], reads: Mapping[str, None], summed: Mapping[str, str], kept: Mapping[str, str]
    ) -> ShardGraph:
        results = {name for node in nodes for name in node.output}
        inputs = [name for name in reads if name not in results and name not in self.constants]
        rename = {name: summed.get(name) or kept.get(name) or name for name in inputs}
        partial = {name: f"partial_{index}" for index, name in enumerate(summed, 1) if name in results}
        rename |= partial | {name: kept[name] for name in results & set(kept)}
        outputs = [name for name in self.graph.outputs if name in results - set(partial)]
        outputs += [name for node in nodes for name in node.output if name in partial or name in kept]
        graph = self.graph_of(nodes, inputs, outputs, rename)
        names = [rename[name] for name in inputs if name not in self.slots]
        order = [name for name in INPUT_ORDER if name in names] + sorted(set(names) - set(INPUT_ORDER))
        slots = {name: name for name in self.slots & set(inputs)}
        sums = {name: summed[original] for original, name in partial.items()}
        return ShardGraph(canonical_proto(graph, "shard", order, slots), sums)

    def graph_of(
        self, nodes: Sequence[NodeProto], inputs: Sequence[str], outputs: Sequence[str], rename: Mapping[str, str]
    ) -> onnx.GraphProto:
        """Return a rank's graph; rename: its values. Raises NotSplit for one that cannot be kept between pieces."""
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
        for name in dict.fromkeys(name for node in graph.node for name in node.input):
            if name in constants:
                graph.initializer.append(numpy_helper.from_array(constants[name], name))
        graph.input.extend(self._io(name, rename) for name in inputs)
        graph.output.extend(self._io(name, rename) for name in outputs)
        return graph

    def _io(self, name: str, rename: Mapping[str, str]) -> onnx.ValueInfoProto:
        element = self.values[name][0]
        shape = list(self.values[name][1])
        if name not in self.graph.inputs and name not in self.graph.outputs and not isinstance(shape[0], int):
            shape[0] = self._tokens
        held = self.flow.weights.get(name) or self.flow.held.get(name)
        if held is not None:
            shape[held.axis] = held.count
        if any(size == "?" or (isinstance(size, str) and index) for index, size in enumerate(shape)):
            raise NotSplit(f"{name} of shape {shape} would have to be kept between two pieces")
        return helper.make_tensor_value_info(rename.get(name, name), element, shape)

    def _local_constants(self, node: NodeProto) -> dict[int, np.ndarray]:
        """Return a rank's sizes in place of the whole ones in a node's constants, by their place among its inputs."""
        parts = {name: self.flow.held[name] for name in node.output if name in self.flow.held}
        if not parts:
            return {}
        name, part = next(iter(parts.items()))
        shape = self.values[name][1]
        if node.op_type in ("Reshape", "Expand"):
            target = self.constants[node.input[1]].copy()
            axis = part.axis - (len(shape) - len(target))
            if axis >= 0 and target[axis] == shape[part.axis]:
                target[axis] = part.count
            return {1: target}
        if node.op_type == "Split":
            return self._local_split(node, parts)
        if node.op_type == "Slice":
            return self._local_slice(node, part)
        local = {}
        for position, operand in enumerate(node.input):
            if operand in self.constants:
                array = self.constants[operand]
                axis = part.axis - (len(shape) - array.ndim)
                if axis >= 0 and array.shape[axis] not in (1, part.count):
                    local[position] = np.take(array, part.indices[0], axis)
        return local

    def _local_split(self, node: NodeProto, parts: Mapping[str, ShardIndices]) -> dict[int, np.ndarray]:
        axis = attributes_of(node).get("axis", 0) % len(self.values[node.input[0]][1])
        if axis != next(iter(parts.values())).axis:
            return {}
        kept = [attribute for attribute in node.attribute if attribute.name != "num_outputs"]
        del node.attribute[:]
        node.attribute.extend(kept)
        return {1: np.array([parts[name].count for name in node.output], np.int64)}

    def _local_slice(self, node: NodeProto, part: ShardIndices) -> dict[int, np.ndarray]:
        whole = self.flow.held[node.input[0]]
        shape = self.values[node.input[0]][1]
        starts, ends, axes = (self.constants[name].copy() for name in node.input[1:4])
        for position, axis in enumerate(axes.tolist()):
            if axis % len(shape) != part.axis:
                continue
            offset = int(starts[position])
            offset += shape[part.axis] if offset < 0 else 0  # type: ignore[operator]
            places = zip(whole.indices, part.indices + offset, strict=True)
            begins = {int(np.flatnonzero(indices == taken[0])[0]) for indices, taken in places}
            begin = begins.pop()
            if begins or not np.array_equal(whole.indices[:, begin : begin + part.count], part.indices + offset):
                raise NotSplit(f"a slice takes other places of {node.input[0]} at other ranks")
            starts[position] = begin
            ends[position] = begin + part.count
        return {1: starts, 2: ends}
