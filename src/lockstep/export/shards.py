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
from onnx import helper, numpy_helper

from lockstep.artifacts.tensor_parallel import Shard, heads_divide
from lockstep.errors import InputError
from lockstep.export.canonical import OPSET, Graph, canonical
from lockstep.export.cut import INPUT_ORDER, BatchlessGraph
from lockstep.export.shard_flow import Flow, find_flow, shapes_of
from lockstep.export.shard_parts import NotSplit, ShardIndices, even
from lockstep.export.shard_sums import join_sums


def as_shard(held: ShardIndices) -> Shard:
    """Return the same in the assembly's form."""
    ranges = []
    for indices in held.indices:
        ends = np.flatnonzero(np.diff(indices) != 1) + 1
        ranges.append(tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(indices, ends)))
    return Shard(held.axis, tuple(ranges))


@dataclass(frozen=True)
class ShardGraph:
    """A graph that each rank runs between two sums over the ranks.

    sums: {partial sum that it gives: the name under which later pieces read their sum}.
    """

    graph: Graph
    sums: Mapping[str, str]


@dataclass(frozen=True)
class Shards:
    """A block in pieces, for several ranks.

    held: what ranks hold of its inputs and outputs; those that are not named are whole. weights: what they take of its
    slots, of which `rows` are those of row-parallel products; first: slots of which all but the first rank take zeros.
    whole: {output: why each rank has all of it, though a part would do}.
    """

    pieces: tuple[ShardGraph, ...]
    held: Mapping[str, ShardIndices]
    weights: Mapping[str, ShardIndices]
    rows: frozenset[str]
    first: frozenset[str]
    whole: Mapping[str, str]


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of the attention before a block, or behind it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    @classmethod
    def of(cls, batchless: BatchlessGraph) -> Heads:
        return cls(batchless.num_heads, batchless.num_kv_heads, batchless.head_dim, batchless.value_head_dim)

    def held(self, ranks: int) -> dict[str, ShardIndices]:
        """Return what a rank holds of query, key, value and attention.

        They are [num_tokens, heads * head_dim]. Key and value heads of which there are fewer than ranks are held by
        several. Raises InputError for heads that do not divide.
        """
        if not heads_divide(self.num_heads, self.num_kv_heads, ranks):
            raise InputError(
                f"tensor_parallel: expected a divisor of the {self.num_heads} attention heads, and a divisor or a "
                f"multiple of the {self.num_kv_heads} key and value heads, found {ranks}"
            )
        sizes = {
            "query": (self.num_heads, self.head_dim),
            "key": (self.num_kv_heads, self.head_dim),
            "value": (self.num_kv_heads, self.value_head_dim),
            "attention": (self.num_heads, self.value_head_dim),
        }
        found = {name: even(1, heads * dim, ranks, dim) for name, (heads, dim) in sizes.items()}
        return {name: part for name, part in found.items() if part is not None}


def shard_block(block: Graph, before: Heads | None, behind: Heads | None, ranks: int) -> Shards:
    """Cut a block into pieces for `ranks` ranks.

    before, behind: the attentions around the block; None: there is none. Raises InputError where its input or its
    weights cannot be split.
    """
    slots = {slot.name for slot in block.signature.slots}
    given = {"attention": before.held(ranks)["attention"]} if before else {}
    wanted = {name: part for name, part in (behind.held(ranks) if behind else {}).items() if name != "attention"}
    for output in block.signature.outputs:
        if output.name == "logits" and (part := even(1, int(output.shape[1]), ranks)) is not None:
            wanted["logits"] = part
    model = block.proto
    try:
        flow = find_flow(model, slots, given, wanted, ranks)
        if (joined := join_sums(model, flow)) is not None:
            model = joined
            flow = find_flow(model, slots, given, wanted, ranks)
        pieces = _Cutter(model, slots, flow).pieces()
    except NotSplit as reason:
        raise InputError(f"tensor_parallel: this model cannot be split over {ranks} ranks: {reason}") from None
    outer = {value.name for value in (*model.graph.input, *model.graph.output)}
    held = {name: part for name, part in flow.held.items() if name in outer - slots}
    return Shards(tuple(pieces), held, flow.weights, frozenset(flow.rows), frozenset(flow.first), flow.whole)


def check_plan(shards: Shards, plan: Mapping[str, str]) -> None:
    """Hold the data flow against transformers' own plan.

    plan: {"layers.*.mlp.up_proj": "colwise"}. What the plan splits and the flow leaves whole is right, if larger.
    Raises InputError for a weight that they split differently.
    """
    for slot in shards.weights:
        name = slot.partition(".")[2].removesuffix(".weight")
        style = next((style for key, style in plan.items() if key.partition("*.")[2] == name), "")
        expected = "row" if slot in shards.rows else "col"
        if ("colwise" in style and expected == "row") or ("rowwise" in style and expected == "col"):
            raise InputError(
                f"tensor_parallel: {name}: expected a {expected}-wise split from the data flow, found {style!r} in the "
                f"plan of transformers; please report it"
            )


def shard_batchless(batchless: BatchlessGraph, ranks: int) -> BatchlessGraph:
    """Return a rank's part of the batchless graph of an attention.

    Raises InputError where that is none by heads.
    """
    heads = Heads.of(batchless)
    given = {name: part for name, part in heads.held(ranks).items() if name != "attention"}
    model = ir.to_proto(ir.Model(batchless.graph, ir_version=10))
    if not model.opset_import:
        model.opset_import.append(helper.make_opsetid("", OPSET))
    outputs = [value.name for value in model.graph.output]
    wanted = {
        output: ShardIndices(1, part.indices[:, ::size] // size)
        for output, part, size in zip(
            outputs,
            (given["query"], given["key"], given["value"]),
            (heads.head_dim, heads.head_dim, heads.value_head_dim),
            strict=True,
        )
    }
    try:
        flow = find_flow(model, (), given, wanted, ranks)
        graph = _Cutter(model, set(), flow).whole_graph()
    except NotSplit as reason:
        raise InputError(f"tensor_parallel: the attention of this model cannot be split: {reason}") from None
    made = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)).graph
    counts = [wanted[output].count for output in outputs]
    return replace(batchless, graph=made, num_heads=counts[0], num_kv_heads=counts[1])


class _Cutter:
    """Writes the graphs of a rank."""

    def __init__(self, model: onnx.ModelProto, slots: set[str], flow: Flow):
        self.graph, self.slots, self.flow = model.graph, slots, flow
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.graph.initializer}
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self.types = {
            value.name: value.type.tensor_type.elem_type
            for value in (*inferred.input, *inferred.value_info, *inferred.output)
        }
        self.shapes = shapes_of(model)
        self.outputs = [value.name for value in self.graph.output]
        self._declared = {value.name for value in (*self.graph.input, *self.graph.output)}

    def whole_graph(self) -> onnx.GraphProto:
        """Return all in one graph, where nothing is summed over the ranks.

        Raises NotSplit where something is.
        """
        if self.flow.summed:
            raise NotSplit("an attention without weights has sums over heads")
        return self._graph(list(self.graph.node), [v.name for v in self.graph.input], self.outputs, {})

    def pieces(self) -> list[ShardGraph]:
        """Return the pieces, one more than there are sums in a row.

        What depends on positions alone is computed wherever it is read.
        """
        anywhere = {value.name for value in self.graph.input if value.name in ("position_ids", "logit_rows")}
        free: dict[str, onnx.NodeProto] = {}
        summed = {
            name: name if name in self.outputs else f"sum_{index}" for index, name in enumerate(self.flow.summed, 1)
        }
        level = {value.name: 0 for value in self.graph.input} | dict.fromkeys(self.constants, 0)
        at: list[list[onnx.NodeProto]] = [[]]
        for node in self.graph.node:
            if all(name in anywhere or name in free or name in self.constants for name in node.input if name):
                free.update(dict.fromkeys(node.output, node))
                continue
            here = max(level[name] + (name in summed) for name in node.input if name and name not in free)
            level.update(dict.fromkeys(node.output, here))
            at += [[] for _ in range(here + 1 - len(at))]
            at[here].append(node)
        at = [self._with_free(nodes, free) for nodes in at]
        reads_of = [dict.fromkeys(name for node in nodes for name in node.input if name) for nodes in at]
        inputs = {value.name for value in self.graph.input}
        kept: dict[str, str] = {}
        for index, reads in enumerate(reads_of):
            for name in reads:
                known = name in inputs or name in self.constants or name in free or name in summed
                if not known and level[name] < index and name not in self.outputs and name not in kept:
                    kept[name] = f"kept_{len(kept) + 1}"
        return [self._piece(nodes, reads, summed, kept) for nodes, reads in zip(at, reads_of, strict=True)]

    def _with_free(self, nodes: list[onnx.NodeProto], free: Mapping[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Return `nodes`, and before them what they need of `free`."""
        needed: set[str] = set()
        stack = [name for node in nodes for name in node.input if name in free]
        while stack:
            name = stack.pop()
            if name not in needed:
                needed.update(free[name].output)
                stack += [given for given in free[name].input if given in free]
        return [node for node in self.graph.node if node.output[0] in needed] + nodes

    def _piece(
        self,
        nodes: Sequence[onnx.NodeProto],
        reads: Mapping[str, None],
        summed: Mapping[str, str],
        kept: Mapping[str, str],
    ) -> ShardGraph:
        made = {name for node in nodes for name in node.output}
        inputs = [name for name in reads if name not in made and name not in self.constants]
        rename = {name: summed.get(name) or kept.get(name) or name for name in inputs}
        partial = {name: f"partial_{index}" for index, name in enumerate(summed, 1) if name in made}
        rename |= partial | {name: kept[name] for name in made & set(kept)}
        outputs = [name for name in self.outputs if name in made - set(partial)]
        outputs += [name for node in nodes for name in node.output if name in partial or name in kept]
        graph = self._graph(nodes, inputs, outputs, rename)
        names = [rename[name] for name in inputs if name not in self.slots]
        order = [name for name in INPUT_ORDER if name in names] + sorted(set(names) - set(INPUT_ORDER))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        slots = {name: name for name in self.slots & set(inputs)}
        return ShardGraph(
            canonical(ir.from_proto(model).graph, "shard", order, slots),
            {name: summed[original] for original, name in partial.items()},
        )

    def _graph(
        self, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str], rename: Mapping[str, str]
    ) -> onnx.GraphProto:
        graph = onnx.GraphProto(name="shard")
        self._made: dict[str, np.ndarray] = {}
        for node in nodes:
            new = graph.node.add()
            new.CopyFrom(node)
            self._localise(new)
            new.input[:] = [rename.get(name, name) for name in new.input]
            new.output[:] = [rename.get(name, name) for name in new.output]
        used = dict.fromkeys(name for node in graph.node for name in node.input)
        for name in used:
            array = self._made.get(name, self.constants.get(name))
            if array is not None:
                graph.initializer.append(numpy_helper.from_array(array, name))
        graph.input.extend(self._io(name, rename) for name in inputs)
        graph.output.extend(self._io(name, rename) for name in outputs)
        return graph

    def _io(self, name: str, rename: Mapping[str, str]) -> onnx.ValueInfoProto:
        shape, tokens = list(self.shapes[name]), self._tokens()
        if name not in self._declared:
            shape = [tokens if not isinstance(size, int) and index == 0 else size for index, size in enumerate(shape)]
        held = self.flow.weights.get(name) or self.flow.held.get(name)
        if held is not None:
            shape[held.axis] = held.count
        if any(size == "?" or (isinstance(size, str) and index) for index, size in enumerate(shape)):
            raise NotSplit(f"{name} of shape {shape} would have to be kept between two pieces")
        return helper.make_tensor_value_info(rename.get(name, name), self.types[name], shape)

    def _tokens(self) -> str:
        first = [self.shapes[value.name][0] for value in self.graph.output if self.shapes[value.name]]
        return next((size for size in first if isinstance(size, str) and size != "?"), "num_tokens")

    def _localise(self, node: onnx.NodeProto) -> None:
        """Turn the sizes in a node's constants into a rank's."""
        held = self.flow.held
        parts = {name: held[name] for name in node.output if name in held}
        if not parts:
            return
        name, part = next(iter(parts.items()))
        if node.op_type in ("Reshape", "Expand"):
            target = self.constants[node.input[1]].copy()
            axis = part.axis - (len(self.shapes[name]) - len(target))
            if axis >= 0 and target[axis] == self.shapes[name][part.axis]:
                target[axis] = part.count
            node.input[1] = self._constant(node, target)
        elif node.op_type == "Split":
            self._localise_split(node, parts)
        elif node.op_type == "Slice":
            self._localise_slice(node, part)
        else:
            for position, given in enumerate(node.input):
                if given in self.constants:
                    shape = self.constants[given].shape
                    axis = part.axis - (len(self.shapes[name]) - len(shape))
                    if axis >= 0 and shape[axis] not in (1, part.count):
                        taken = np.take(self.constants[given], part.indices[0], axis)
                        node.input[position] = self._constant(node, taken, f"{position}")

    def _localise_split(self, node: onnx.NodeProto, parts: Mapping[str, ShardIndices]) -> None:
        axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 0)
        if axis % len(self.shapes[node.input[0]]) != next(iter(parts.values())).axis:
            return
        counts = np.array([parts[name].count for name in node.output], np.int64)
        kept = [attribute for attribute in node.attribute if attribute.name != "num_outputs"]
        del node.attribute[:]
        node.attribute.extend(kept)
        del node.input[1:]
        node.input.append(self._constant(node, counts))

    def _localise_slice(self, node: onnx.NodeProto, part: ShardIndices) -> None:
        whole = self.flow.held[node.input[0]]
        starts, ends, axes = (self.constants[each].copy() for each in node.input[1:4])
        for position, axis in enumerate(axes.tolist()):
            if axis % len(self.shapes[node.input[0]]) != part.axis:
                continue
            offset = int(starts[position])
            offset += self.shapes[node.input[0]][part.axis] if offset < 0 else 0  # type: ignore[operator]
            first = {
                int(np.flatnonzero(all_of == taken[0] + offset)[0])
                for all_of, taken in zip(whole.indices, part.indices, strict=True)
            }
            (begin,) = first if len(first) == 1 else (None,)
            if begin is None or any(
                not np.array_equal(all_of[begin : begin + part.count], taken + offset)
                for all_of, taken in zip(whole.indices, part.indices, strict=True)
            ):
                raise NotSplit(f"a slice takes other places of {node.input[0]} at other ranks")
            starts[position], ends[position] = begin, begin + part.count
        node.input[1], node.input[2] = self._constant(node, starts, "starts"), self._constant(node, ends, "ends")

    def _constant(self, node: onnx.NodeProto, array: np.ndarray, label: str = "") -> str:
        name = f"{node.name or node.output[0]}/{label or 'rank'}"
        self._made[name] = np.ascontiguousarray(array)
        return name
