"""Cut a packed trace at its attention nodes, by data flow.

In: a packed trace (simplify.pack). Out: a block before each token mixer, the exit block after the last, and for each
layer its batchless graph. For attention this is the nodes between the block's flat query, key, value and the attention
that see positions (RoPE) and read no weight, with the data movement around them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir import convenience

from lockstep.errors import InputError
from lockstep.export.axes import ELEMENTWISE
from lockstep.export.canonical import Graph, canonical
from lockstep.export.flow import Flow, layout_of
from lockstep.export.markers import DOMAIN
from lockstep.export.movement import merge_movement
from lockstep.export.state_mixer import Recurrence, StateGraph, TokenWindow
from lockstep.onnx_tools.toolkit import GraphWriter, Operand, node_of
from lockstep.onnx_tools.values import array_of, dtype_of, number, required, shape_of, upstream

_ROLES = ("query", "key", "value")
# The inputs of each token mixer, in the order of its marker.
_INPUTS = {
    "Attention": _ROLES,
    "TokenWindow": TokenWindow.inputs,
    "DeltaRule": ("query", "key", "value", "decay", "beta"),
    "LinearAttention": ("query", "key", "value", "decay"),
}
_SHAPED = ELEMENTWISE | {"Reshape"}
INPUT_ORDER = ("hidden", "attention", "token_ids", "position_ids", "logit_rows")


@dataclass(frozen=True)
class BatchlessGraph:
    """A layer's batchless part, not yet a prefill or decode graph.

    graph: query, key, value (flat), position_ids -> rotated query, key and value `[num_tokens, heads, head_dim]`.
    sinks: whether each head has a logit next to its scores. It is appended to the numbers of its head in the query, and
    is the graph's fourth output, `[num_tokens, num_heads]`.
    """

    graph: ir.Graph
    scale: float
    softcap: float
    window: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    sinks: bool = False


Batchless = BatchlessGraph | StateGraph


@dataclass(frozen=True)
class Cut:
    """blocks[i] precedes batchless[i], exit follows the last; layers[i]: index of the traced layer of mixer i."""

    blocks: tuple[Graph, ...]
    exit: Graph
    batchless: tuple[Batchless, ...]
    layers: tuple[int, ...]


def cut(model: ir.Model, weights: frozenset[str], layer_prefix: str, traced: Sequence[int]) -> Cut:
    """Cut `model`, which is modified.

    weights: names of its weights. layer_prefix: of the layers' parameters. traced: numbers of the layers. Raises
    InputError with the reason where no clean cut exists.
    """
    graph = model.graph
    # The order matters: where to cut is found on flattened attention, and all cuts are made before values are assigned
    # to blocks, as each of them rewrites the graph around it.
    _flatten_attention(graph)
    flow = Flow(graph, weights)
    markers = [node for node in graph if node.domain == DOMAIN]
    flat: set[ir.Value] = set()
    points = [_cut_points(graph, flow, marker, flat) for marker in markers]
    spans = _spans(graph, flow, markers, points)
    batchless = tuple(_batchless_graph(graph, marker, cuts) for marker, (cuts, _) in zip(markers, points, strict=True))
    layers = tuple(traced.index(marker.attributes["layer"].as_int()) for marker in markers)
    blocks = []
    for index, (inputs, outputs) in enumerate(spans):
        block = convenience.extract(graph, list(inputs), list(outputs.values()))
        for value, name in zip(block.inputs, inputs.values(), strict=True):
            _name_token_rows(value, name)
        for value, name in zip(block.outputs, outputs, strict=True):
            _name_token_rows(value, name)
        if index == len(markers):
            label = "exit"
            layer = len(traced)
            _pick_rows(block)
        else:
            label = "entry" if index == 0 else "middle"
            layer = layers[index]
        slots = {weight: _slot(weight, layer, layer_prefix) for weight in block.initializers if weight in weights}
        carried = sorted(name for name in inputs.values() if name not in INPUT_ORDER)
        blocks.append(canonical(block, label, (*INPUT_ORDER, *carried), slots))
    return Cut(tuple(blocks[:-1]), blocks[-1], batchless, layers)


def _name_token_rows(value: ir.Value, name: str) -> None:
    value.name = name
    value.shape = ir.Shape(["num_tokens", *shape_of(value)[1:]])


def _flatten_attention(graph: ir.Graph) -> None:
    """Let each attention return `[num_tokens, num_heads * head_dim]`: most reshapes after it then vanish."""
    for marker in [node for node in graph if node.domain == DOMAIN and node.op_type == "Attention"]:
        out = marker.outputs[0]
        tokens = shape_of(out)[0]
        heads = number(shape_of(out)[1])
        width = number(shape_of(out)[2])
        writer = GraphWriter(graph, after=marker)
        split = writer.op("Reshape", out, [-1, heads, width], shape=out.shape, dtype=out.dtype)
        out.shape = ir.Shape([tokens, heads * width])
        for node, index in [use for use in out.uses() if use.node is not split.producer()]:
            node.replace_input_with(index, split)
    merge_movement(graph)


CutPoint = tuple[list[ir.Value], set[ir.Node]]  # before a token mixer: where it is cut, and the batchless nodes after


def _cut_points(graph: ir.Graph, flow: Flow, marker: ir.Node, flat: set[ir.Value]) -> CutPoint:
    """Make query, key and value flat where they are cut.

    Returns the three flat values, which are added to `flat`, and the batchless nodes after them: RoPE and movement.
    Inputs of a mixer with a state are flat already and are cut where they are. Raises InputError where they cannot be
    cut.
    """
    if marker.op_type != "Attention":
        inputs = [required(value) for value in marker.inputs]
        flat.update(inputs)
        if len(set(inputs)) < len(inputs):
            raise InputError("cannot be split: expected different inputs of a recurrent layer, found one twice")
        return inputs, set()
    cuts = []
    for role, value in zip(_ROLES, map(required, marker.inputs[:3]), strict=True):
        cut_value = flow.cut_value(value)
        width = number(shape_of(value)[1]) * number(shape_of(value)[2])
        layout = layout_of(cut_value, width)
        if layout is None:
            raise InputError(
                f"cannot be split: expected the {role} of a layer as [num_tokens, heads, "
                f"head_dim], found shape {cut_value.shape}"
            )
        if layout != "flat":  # such as [num_heads, num_tokens, head_dim]: a reshape before the cut makes it flat
            _, between = flow.walk(value, stops={cut_value})
            cut_value = _flatten(graph, flow, cut_value, layout, {marker, *between})
        cuts.append(cut_value)
    flat.update(cuts)
    merge_movement(graph, flat)
    if len(set(cuts)) != 3:
        raise InputError(
            "cannot be split: expected query, key and value of a layer as three tensors, found "
            "one shared by two of them"
        )
    if len(marker.inputs) > len(_ROLES):  # with sinks, which become a part of the query
        cuts[0] = _add_sinks(graph, flow, marker, cuts[0], flat)
        merge_movement(graph, flat)
    batchless_nodes: set[ir.Node] = set()
    for value in map(required, marker.inputs):
        batchless_nodes |= flow.walk(value, stops=set(cuts))[1]
    return cuts, batchless_nodes


def _add_sinks(graph: ir.Graph, flow: Flow, marker: ir.Node, query: ir.Value, flat: set[ir.Value]) -> ir.Value:
    """Pass a layer's sinks to its attention with the query, each after the numbers of its head.

    The batchless graph then needs no weight: equal layers share it. query: flat, where it is cut. Returns the flat
    value that replaces it, [num_tokens, heads * (dim + 1)].
    """
    rotated = required(marker.inputs[0])
    sinks = required(marker.inputs[3])
    heads = number(shape_of(rotated)[1])
    dim = number(shape_of(rotated)[2])
    tokens = shape_of(query)[0]
    readers = {marker, *flow.walk(rotated, stops={query})[1]}
    uses = [(node, index) for node, index in query.uses() if node in readers]
    op = _TokenWriter(graph, flow, query).op
    dtype = query.dtype
    if sinks.dtype != dtype:
        assert dtype is not None  # as all values of a trace
        sinks = op("Cast", sinks, shape=[heads], dtype=dtype, to=dtype.value)
    # Shape without `start` and `end`, which would change the bytes of graphs in use.
    count = op("Shape", query, shape=[2], dtype=ir.DataType.INT64)
    count = op("Gather", count, [0], shape=[1], dtype=ir.DataType.INT64, axis=0)
    size = op("Concat", count, [heads, 1], shape=[3], dtype=ir.DataType.INT64, axis=0)
    column = op("Reshape", sinks, [heads, 1], shape=[heads, 1], dtype=dtype)
    columns = op("Expand", column, size, shape=[tokens, heads, 1], dtype=dtype)
    by_head = op("Reshape", query, [-1, heads, dim], shape=[tokens, heads, dim], dtype=dtype)
    joined = op("Concat", by_head, columns, shape=[tokens, heads, dim + 1], dtype=dtype, axis=2)
    carried = op("Reshape", joined, [-1, heads * (dim + 1)], shape=[tokens, heads * (dim + 1)], dtype=dtype)
    flat.discard(query)
    flat.add(carried)
    # After the cut: take the query and the sinks apart.
    back = op("Reshape", carried, [-1, heads, dim + 1], shape=[tokens, heads, dim + 1], dtype=dtype)
    plain_query = op("Slice", back, [0], [dim], [2], shape=[tokens, heads, dim], dtype=dtype)
    plain_query = op("Reshape", plain_query, [-1, heads * dim], shape=[tokens, heads * dim], dtype=dtype)
    sink = op("Slice", back, [dim], [dim + 1], [2], shape=[tokens, heads, 1], dtype=dtype)
    sink = op("Reshape", sink, [-1, heads], shape=[tokens, heads], dtype=dtype)
    for node, index in uses:
        node.replace_input_with(index, plain_query)
    marker.replace_input_with(3, sink)
    return carried


def _flatten(graph: ir.Graph, flow: Flow, value: ir.Value, layout: str, readers: Collection[ir.Node]) -> ir.Value:
    """Route `value`, in `layout` "tokens" or "heads", through [num_tokens, width] for `readers` alone.

    Returns the flat value. The other readers keep theirs, so the graph computes the same.
    """
    shape = shape_of(value)
    is_by_head = layout == "heads"  # [heads, num_tokens, dim]
    if is_by_head:
        head_count, tokens, _ = shape
    else:
        tokens, head_count, _ = shape
    heads = number(head_count)
    dim = number(shape[2])
    dtype = value.dtype
    op = _TokenWriter(graph, flow, value).op
    uses = [(node, index) for node, index in value.uses() if node in readers]
    by_token = [tokens, heads, dim]
    by_head = [heads, tokens, dim]
    swap = [1, 0, 2]
    flat = value
    if is_by_head:
        flat = op("Transpose", value, shape=by_token, dtype=dtype, perm=swap)
    flat = op("Reshape", flat, [-1, heads * dim], shape=[tokens, heads * dim], dtype=dtype)
    back = op("Reshape", flat, [-1, heads, dim], shape=by_token, dtype=dtype)
    if is_by_head:
        back = op("Transpose", back, shape=by_head, dtype=dtype, perm=swap)
    for node, index in uses:
        node.replace_input_with(index, back)
    return flat


class _TokenWriter(GraphWriter):
    """Adds nodes after the one that makes a value; their values depend on tokens."""

    def __init__(self, graph: ir.Graph, flow: Flow, value: ir.Value):
        super().__init__(graph, after=value.producer())
        self._flow = flow

    def op(self, op_type: str, *inputs: Operand | None, **options: Any) -> ir.Value:
        value = super().op(op_type, *inputs, **options)
        self._flow.tokens.add(value)
        return value


def _stages(
    graph: ir.Graph,
    flow: Flow,
    points: Sequence[CutPoint],
    level: Mapping[ir.Node, int],
    batchless: set[ir.Node],
    hidden: ir.Value,
    has_states: bool,
) -> dict[ir.Value, int]:
    """Return the stage of each value, the block that computes it: the number of token mixers before it.

    Values that depend on positions alone have none: each block that reads them computes them.
    """
    stage = {hidden: 0}
    for node in graph:
        input_stages = [stage[value] for value in node.inputs if value in stage]
        if node in level:
            if max(input_stages) != level[node] and not has_states:
                raise InputError(
                    f"cannot be split: the attentions of layers {max(input_stages)} and {level[node]} "
                    f"do not follow one another"
                )
            stage[node.outputs[0]] = level[node] + 1
        elif input_stages:
            stage.update((output, max(input_stages)) for output in node.outputs if not flow.is_position_only(output))
    # So far a value is in the first block that can compute it; these move values to later blocks.
    for (marker, index), (cuts, nodes) in zip(level.items(), points, strict=True):
        if marker.op_type == "Attention":
            _defer_attention_inputs(graph, cuts, stage, index, {marker, *nodes})
            _move_parallel_mlp(index, stage, cuts, batchless)
        else:
            _forward_inputs(graph, marker, cuts, stage, index)
    if has_states:
        _reshape_where_read(graph, stage, level)
    return stage


def _spans(
    graph: ir.Graph, flow: Flow, markers: Sequence[ir.Node], points: Sequence[CutPoint]
) -> list[tuple[dict[ir.Value, str], dict[str, ir.Value]]]:
    """Return the inputs {value: name} and outputs {name: value} of each block."""
    level = {marker: index for index, marker in enumerate(markers)}  # of a mixer: the block before it
    batchless = set(markers).union(*(nodes for _, nodes in points))
    hidden = next(value for value in graph.inputs if value is not flow.positions)
    has_states = any(node.op_type != "Attention" for node in markers)
    stage = _stages(graph, flow, points, level, batchless, hidden, has_states)
    reads = _block_reads(graph, stage, level, batchless, hidden)
    # `hidden` has the same place among the reads of every block: that of the embedding among the second block's.
    first_reads = [value for value in reads[1] if value.producer() not in level]
    hidden_role = 0
    if hidden in first_reads:
        hidden_role = first_reads.index(hidden)
    # Not so next to layers with a state, which let other values cross than layers of attention: there it is the value
    # of the residual stream.
    stream: set[ir.Value] = set()
    if has_states:
        stream = _residual_stream(graph, hidden)
    spans = []
    names: dict[ir.Value, str] = {hidden: "hidden"}
    for index in range(len(markers) + 1):
        inputs = {}
        for value in reads[index]:
            maker = value.producer()
            name = names.get(value)
            if maker is not None and level.get(maker) == index - 1:
                name = "attention"
            elif maker is not None and maker in level:  # an earlier mixer's output
                name = None
            if name is None:
                raise InputError(
                    f"cannot be split: the block before layer {index} reads what an earlier block "
                    f"than the one before it made"
                )
            inputs[value] = name
        if index == len(markers):
            outputs = {"logits": graph.outputs[0]}
        else:
            # In the order in which the next block reads them, so that equal blocks get equal names.
            crossing = [value for value in reads[index + 1] if value.producer() not in level]
            if stream:  # values that pass both mixers of a layer with two
                for later_reads in reads[index + 2 :]:
                    for value in later_reads:
                        if value.producer() not in level and value not in crossing and stage[value] <= index:
                            crossing.append(value)
            hidden_role = next((n for n, value in enumerate(crossing) if value in stream), hidden_role)
            # A value that only passes through keeps its name and is no output of this block; without states the
            # embedding alone does.
            passed = {value: name for value, name in names.items() if value in crossing and stream}
            names = _name_crossing(crossing, passed, hidden_role)
            cuts = points[index][0]
            if any(stage.get(value) != index for value in cuts):
                raise InputError(
                    f"cannot be split: query, key or value of layer {index} is made before the "
                    f"attention of layer {index - 1}"
                )
            outputs = {}
            for value in crossing:
                if value is not hidden and value not in passed:
                    outputs[f"{names[value]}_out"] = value
            outputs |= zip(_INPUTS[markers[index].op_type], cuts, strict=True)
            if names.get(hidden, "hidden") != "hidden":
                raise InputError(
                    "cannot be split: the layers after the first read the embedding in another place than the first"
                )
        if flow.positions is not None and flow.positions in upstream(outputs.values(), inputs):
            inputs[flow.positions] = "position_ids"
        spans.append((inputs, outputs))
    return spans


def _block_reads(
    graph: ir.Graph,
    stage: Mapping[ir.Value, int],
    level: Mapping[ir.Node, int],
    batchless: Collection[ir.Node],
    hidden: ir.Value,
) -> list[dict[ir.Value, None]]:
    """Return the values that each block reads of mixers and earlier blocks, in order."""
    reads: list[dict[ir.Value, None]] = [{} for _ in range(len(level) + 1)]
    for node in graph:
        block = next((stage[output] for output in node.outputs if output in stage), None)
        if node in batchless or block is None:
            continue
        for value in node.inputs:
            if value is None or value not in stage:
                continue
            if value is hidden or value.producer() in level or stage[value] < block:
                reads[block][value] = None
    return reads


def _name_crossing(
    crossing: Sequence[ir.Value], passed: Mapping[ir.Value, str], hidden_role: int
) -> dict[ir.Value, str]:
    """Return the names of values that cross to the next block: "hidden" at `hidden_role`, else a free "carry_N"."""
    names = dict(passed)
    free_names = (name for n in itertools.count(1) if (name := f"carry_{n}") not in passed.values())
    for index, value in enumerate(crossing):
        if value not in passed:
            names[value] = "hidden" if index == hidden_role else next(free_names)
    return names


def _residual_stream(graph: ir.Graph, hidden: ir.Value) -> set[ir.Value]:
    """Return the residual stream: `hidden`, its sums with other values, and its products with a number."""
    stream = {hidden}
    for node in graph:
        if stream.isdisjoint(node.inputs):
            continue
        arrays = [array_of(value) for value in node.inputs]
        is_scaled = node.op_type == "Mul" and any(array is not None and array.size == 1 for array in arrays)
        if is_scaled or node.op_type in ("Add", "Cast"):
            stream.update(node.outputs)
    return stream


def _reshape_where_read(graph: ir.Graph, stage: dict[ir.Value, int], level: Mapping[ir.Node, int]) -> None:
    """Move element-wise results of a single value to the block that reads them; updates `stage`.

    The value itself then crosses, which has rows of tokens, where a reshaped result may not have them.
    """

    def sources(value: ir.Value) -> set[ir.Value]:
        node = value.producer()
        if node is None or node in level or node.op_type not in _SHAPED:
            return {value}
        return set().union(*(sources(operand) for operand in node.inputs if operand in stage))

    for node in reversed(list(graph)):
        value = node.outputs[0]
        if node.op_type in _SHAPED and value in stage and len(sources(value)) == 1:
            reader_stages = []
            for user in value.consumers():
                reader_stage = level.get(user, stage.get(user.outputs[0]))
                if reader_stage is not None:
                    reader_stages.append(reader_stage)
            stage[value] = max(stage[value], min(reader_stages, default=stage[value]))


def _forward_inputs(
    graph: ir.Graph, marker: ir.Node, cuts: list[ir.Value], stage: dict[ir.Value, int], index: int
) -> None:
    """Forward a mixer's inputs from earlier blocks through the block before it, in place."""
    for position, value in enumerate(cuts):
        if stage.get(value, index) < index:
            node = node_of("Identity", [value], shape_of(value), value.dtype)
            graph.insert_before(marker, node)
            marker.replace_input_with(position, node.outputs[0])
            cuts[position] = node.outputs[0]
            stage[node.outputs[0]] = index


def _defer_attention_inputs(
    graph: ir.Graph, cuts: Sequence[ir.Value], stage: dict[ir.Value, int], index: int, attention: Collection[ir.Node]
) -> None:
    """Move values that only attention `index` reads to the block before it (Falcon-H1, next to its recurrence)."""
    if all(stage.get(value, index) == index for value in cuts):
        return
    needed = upstream(cuts, ())
    for node in reversed(list(graph)):
        if needed.isdisjoint(node.outputs):
            continue
        readers = itertools.chain.from_iterable(value.consumers() for value in node.outputs)
        if all(user in attention or stage.get(user.outputs[0]) == index for user in readers):
            stage.update((value, index) for value in node.outputs if value in stage)


def _move_parallel_mlp(
    index: int, stage: dict[ir.Value, int], cuts: Iterable[ir.Value], batchless: set[ir.Node]
) -> None:
    """Move a parallel MLP from the block before attention `index` to the one after it.

    These are the values of that block that the attention does not need. They are moved if no more values cross the cut
    then. Several ranks then need one all-reduce for MLP and attention, and the exit computes the MLP for the rows of
    its logits alone.
    """

    def upstream_in_block(values: Iterable[ir.Value]) -> set[ir.Value]:
        stops = batchless | {value for value, number in stage.items() if number != index}
        reached = upstream(values, stops)
        return {value for value in reached if stage.get(value) == index and value.producer() is not None}

    def crossing(moved: Collection[ir.Value]) -> set[ir.Value]:
        """Return the values that cross the cut once `moved` is after it."""

        def is_after(value: ir.Value) -> bool:
            return stage.get(value, -1) > index or value in moved

        values = set()
        for value in stage:
            if not is_after(value):
                readers = [node for node in value.consumers() if node not in batchless]
                if any(is_after(node.outputs[0]) for node in readers):
                    values.add(value)
        return values

    crossing_now = crossing(())
    movable = upstream_in_block(crossing_now) - upstream_in_block(cuts)
    crossing_then = crossing(movable)
    if len(crossing_then) <= len(crossing_now) and not any(value.producer() in batchless for value in crossing_then):
        stage.update(dict.fromkeys(movable, index + 1))


def _batchless_graph(graph: ir.Graph, marker: ir.Node, cuts: list[ir.Value]) -> Batchless:
    if marker.op_type == "TokenWindow":
        return TokenWindow(number(shape_of(cuts[0])[1]), marker.attributes["width"].as_int(), dtype_of(cuts[0]))
    if marker.op_type != "Attention":
        sizes = {name: number(shape_of(value)[1]) for name, value in zip(_INPUTS[marker.op_type], cuts, strict=True)}
        return Recurrence(sizes, marker.attributes["key_heads"].as_int(), marker.attributes["value_heads"].as_int())
    positions = next(value for value in graph.inputs if value.name == "position_ids")
    batchless = convenience.extract(graph, [*cuts, positions], [required(value) for value in marker.inputs])
    for value, name in zip(batchless.inputs, (*_ROLES, "position_ids"), strict=True):
        _name_token_rows(value, name)
    query, key, value_shape = (shape_of(operand) for operand in marker.inputs[:3])
    attributes = marker.attributes
    return BatchlessGraph(
        graph=batchless,
        scale=attributes["scale"].as_float(),
        softcap=attributes["softcap"].as_float(),
        window=attributes["window"].as_int(),
        num_heads=number(query[1]),
        num_kv_heads=number(key[1]),
        head_dim=number(query[2]),
        value_head_dim=number(value_shape[2]),
        sinks=len(marker.inputs) > len(_ROLES),
    )


def _pick_rows(block: ir.Graph) -> None:
    """Let the exit block first gather the rows of `logit_rows [num_requests]`."""
    rows = ir.Value(name="logit_rows", shape=ir.Shape(["num_requests"]), type=ir.TensorType(ir.DataType.INT64))
    first = next(iter(block))
    for value in list(block.inputs):
        shape = ["num_requests", *shape_of(value)[1:]]
        gather = node_of("Gather", [value, rows], shape, value.dtype, [ir.AttrInt64("axis", 0)])
        value.replace_all_uses_with(gather.outputs[0])
        gather.replace_input_with(0, value)
        block.insert_before(first, gather)
    block.inputs.append(rows)
    block.outputs[0].shape = ir.Shape(["num_requests", *shape_of(block.outputs[0])[1:]])


def _slot(name: str, layer: int, prefix: str) -> str:
    """Return a weight's name relative to its block.

    "current." for layer `layer`, "previous." for the one before, "previous_2." for the one before that, over layers
    without a mixer; else the full name. Raises InputError for a weight of another layer.
    """
    match = re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.(.+)", name)
    if match is None:
        return name
    back = layer - int(match[1])
    if back < 0:
        raise InputError(f"cannot be split: the block before layer {layer} reads {name}, a weight of another layer")
    prefixes = {0: "current", 1: "previous"}
    return f"{prefixes.get(back, f'previous_{back}')}.{match[2]}"


def bind_slot(slot: str, layer: int, prefix: str) -> str:
    """Return the parameter that `slot` takes in the block before layer `layer`: the inverse of `_slot`."""
    match = re.fullmatch(r"(current|previous(?:_(\d+))?)\.(.+)", slot)
    if match is None:
        return slot
    if match[1] != "current":
        layer -= int(match[2] or 1)
    return f"{prefix}.{layer}.{match[3]}"
