"""Cut a packed trace at its attention nodes, by data flow.

In: a packed trace (simplify.pack). Out: a block before each token mixer, the exit block after the last, and for each
layer its batchless graph. That of attention: the nodes between the block's flat query, key, value and the attention
that see positions (RoPE) and hold no weight, with the data movement around them.
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
from lockstep.export.known import GraphWriter, Operand, dtype_of, node_of, number, required, shape_of, upstream
from lockstep.export.markers import DOMAIN
from lockstep.export.movement import merge_movement
from lockstep.export.state_mixer import Recurrence, StateGraph, TokenWindow

_ROLES = ("query", "key", "value")
# What each token mixer takes, in the order of its marker.
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
    sinks: whether each head has a logit beside its scores. It comes with the query then, behind the numbers of its
    head, and is the graph's fourth output, `[num_tokens, num_heads]`.
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
    """blocks[i] stands before batchless[i], exit after the last; layers[i]: the traced layer of mixer i."""

    blocks: tuple[Graph, ...]
    exit: Graph
    batchless: tuple[Batchless, ...]
    layers: tuple[int, ...]


def cut(model: ir.Model, weights: frozenset[str], layer_prefix: str, traced: Sequence[int]) -> Cut:
    """Cut `model`, which is changed on the way.

    weights: names of its weights. layer_prefix: of the layers' parameters. traced: numbers of the layers. Raises
    InputError with the reason where a clean cut does not exist.
    """
    graph = model.graph
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
        part = convenience.extract(graph, list(inputs), list(outputs.values()))
        for value, name in zip(part.inputs, inputs.values(), strict=True):
            value.name = name
            value.shape = ir.Shape(["num_tokens", *shape_of(value)[1:]])
        for value, name in zip(part.outputs, outputs, strict=True):
            value.name = name
            value.shape = ir.Shape(["num_tokens", *shape_of(value)[1:]])
        name = "entry" if index == 0 else "middle"
        layer = (*layers, len(traced))[index]
        if index == len(markers):
            name = "exit"
            _pick_rows(part)
        slots = {weight: _slot(weight, layer, layer_prefix) for weight in part.initializers if weight in weights}
        carried = sorted(carry for carry in inputs.values() if carry not in INPUT_ORDER)
        blocks.append(canonical(part, name, (*INPUT_ORDER, *carried), slots))
    return Cut(tuple(blocks[:-1]), blocks[-1], batchless, layers)


def _flatten_attention(graph: ir.Graph) -> None:
    """Let each attention give `[num_tokens, num_heads * head_dim]`: most reshapes behind it then vanish."""
    for marker in [node for node in graph if node.domain == DOMAIN and node.op_type == "Attention"]:
        out = marker.outputs[0]
        tokens = shape_of(out)[0]
        heads = number(shape_of(out)[1])
        width = number(shape_of(out)[2])
        writer = GraphWriter(graph, f"{out.name}/heads", marker)
        split = writer.op("Reshape", out, [-1, heads, width], shape=out.shape, dtype=out.dtype)
        out.shape = ir.Shape([tokens, heads * width])
        for node, index in [use for use in out.uses() if use.node is not split.producer()]:
            node.replace_input_with(index, split)
    merge_movement(graph)


def _cut_points(
    graph: ir.Graph, flow: Flow, marker: ir.Node, flat: set[ir.Value]
) -> tuple[list[ir.Value], set[ir.Node]]:
    """Make query, key and value flat where they are cut.

    Returns the three flat values, which are added to `flat`, and the batchless nodes behind them. What a mixer with a
    state takes is flat and cut as it is. Raises InputError where they cannot be cut.
    """
    if marker.op_type != "Attention":
        flat.update(inputs := [required(value) for value in marker.inputs])
        if len(set(inputs)) < len(inputs):
            raise InputError("cannot be split: expected inputs of a recurrent layer of its own each, found one twice")
        return inputs, set()
    cuts = []
    for role, value in zip(_ROLES, map(required, marker.inputs[:3]), strict=True):
        at = flow.cut_value(value)
        width = number(shape_of(value)[1]) * number(shape_of(value)[2])
        layout = layout_of(at, width)
        if layout is None:
            raise InputError(
                f"cannot be split: expected the {role} of a layer as [num_tokens, heads, "
                f"head_dim], found shape {at.shape}"
            )
        _, between = flow.walk(value, stops={at})
        cuts.append(at if layout == "flat" else _flatten(graph, flow, at, layout, {marker, *between}))
    flat.update(cuts)
    merge_movement(graph, flat)
    if len(set(cuts)) != 3:
        raise InputError(
            "cannot be split: expected query, key and value of a layer as three tensors, found "
            "one shared by two of them"
        )
    if len(marker.inputs) > len(_ROLES):
        cuts[0] = _add_sinks(graph, flow, marker, cuts[0], flat)
        merge_movement(graph, flat)
    behind: set[ir.Node] = set()
    for given in marker.inputs:
        behind |= flow.walk(required(given), stops=set(cuts))[1]
    return cuts, behind


def _add_sinks(graph: ir.Graph, flow: Flow, marker: ir.Node, query: ir.Value, flat: set[ir.Value]) -> ir.Value:
    """Let a layer's sinks reach its attention with the query, each behind the numbers of its head.

    query: flat, as it is cut. Attention then needs no weight. Returns the flat value that takes the query's place.
    """
    given = required(marker.inputs[0])
    sinks = required(marker.inputs[3])
    heads = number(shape_of(given)[1])
    dim = number(shape_of(given)[2])
    tokens = shape_of(query)[0]
    readers = {marker, *flow.walk(given, stops={query})[1]}
    uses = [(node, index) for node, index in query.uses() if node in readers]
    op = _Behind(graph, flow, query).op
    dtype = query.dtype
    if sinks.dtype != dtype:
        assert dtype is not None  # as all values of a trace
        sinks = op("Cast", sinks, shape=[heads], dtype=dtype, to=dtype.value)
    # no `start` and `end`: graphs keep their bytes
    count = op("Shape", query, shape=[2], dtype=ir.DataType.INT64)
    count = op("Gather", count, [0], shape=[1], dtype=ir.DataType.INT64, axis=0)
    size = op("Concat", count, [heads, 1], shape=[3], dtype=ir.DataType.INT64, axis=0)
    column = op("Reshape", sinks, [heads, 1], shape=[heads, 1], dtype=dtype)
    columns = op("Expand", column, size, shape=[tokens, heads, 1], dtype=dtype)
    by_head = op("Reshape", query, [-1, heads, dim], shape=[tokens, heads, dim], dtype=dtype)
    both = op("Concat", by_head, columns, shape=[tokens, heads, dim + 1], dtype=dtype, axis=2)
    carried = op("Reshape", both, [-1, heads * (dim + 1)], shape=[tokens, heads * (dim + 1)], dtype=dtype)
    flat.discard(query)
    flat.add(carried)
    back = op("Reshape", carried, [-1, heads, dim + 1], shape=[tokens, heads, dim + 1], dtype=dtype)
    own = op("Slice", back, [0], [dim], [2], shape=[tokens, heads, dim], dtype=dtype)
    own = op("Reshape", own, [-1, heads * dim], shape=[tokens, heads * dim], dtype=dtype)
    sink = op("Slice", back, [dim], [dim + 1], [2], shape=[tokens, heads, 1], dtype=dtype)
    sink = op("Reshape", sink, [-1, heads], shape=[tokens, heads], dtype=dtype)
    for node, index in uses:
        node.replace_input_with(index, own)
    marker.replace_input_with(3, sink)
    return carried


def _flatten(graph: ir.Graph, flow: Flow, value: ir.Value, layout: str, readers: Collection[ir.Node]) -> ir.Value:
    """Put `value` through [num_tokens, width] for `readers` alone; return the flat value."""
    shape = shape_of(value)
    tokens, heads = (shape[1], number(shape[0])) if layout == "heads" else (shape[0], number(shape[1]))
    dim = number(shape[2])
    dtype = value.dtype
    op = _Behind(graph, flow, value).op
    uses = [(node, index) for node, index in value.uses() if node in readers]
    by_token = [tokens, heads, dim]
    by_head = [heads, tokens, dim]
    swap = [1, 0, 2]
    flat = op("Transpose", value, shape=by_token, dtype=dtype, perm=swap) if layout == "heads" else value
    flat = op("Reshape", flat, [-1, heads * dim], shape=[tokens, heads * dim], dtype=dtype)
    back = op("Reshape", flat, [-1, heads, dim], shape=by_token, dtype=dtype)
    back = op("Transpose", back, shape=by_head, dtype=dtype, perm=swap) if layout == "heads" else back
    for node, index in uses:
        node.replace_input_with(index, back)
    return flat


class _Behind(GraphWriter):
    """Puts nodes, which give values of tokens, behind the one that makes a value."""

    def __init__(self, graph: ir.Graph, flow: Flow, value: ir.Value):
        super().__init__(graph, f"{value.name}/cut", value.producer())
        self._flow = flow

    def op(self, op_type: str, *inputs: Operand, **options: Any) -> ir.Value:
        value = super().op(op_type, *inputs, **options)
        self._flow.tokens.add(value)
        return value


def _spans(
    graph: ir.Graph, flow: Flow, markers: Sequence[ir.Node], points: Sequence[tuple[list[ir.Value], set[ir.Node]]]
) -> list[tuple[dict[ir.Value, str], dict[str, ir.Value]]]:
    """Return the inputs {value: name} and outputs {name: value} of each block, by the stage of each value."""
    level = {marker: index for index, marker in enumerate(markers)}
    batchless = set(markers).union(*(behind for _, behind in points))
    hidden = next(value for value in graph.inputs if value is not flow.positions)
    stage = {hidden: 0}
    has_states = any(node.op_type != "Attention" for node in markers)
    for node in graph:
        known = [stage[value] for value in node.inputs if value in stage]
        if node in level:
            if max(known) != level[node] and not has_states:
                raise InputError(
                    f"cannot be split: the attentions of layers {max(known)} and {level[node]} "
                    f"do not follow one another"
                )
            stage[node.outputs[0]] = level[node] + 1
        elif known:
            stage.update((output, max(known)) for output in node.outputs if not flow.position_only(output))
    for index, (cuts, behind) in enumerate(points):
        if markers[index].op_type == "Attention":
            _compute_late(graph, cuts, stage, index, {markers[index], *behind})
            _put_behind(index, stage, cuts, batchless)
        else:
            _hand_on(graph, markers[index], cuts, stage, index)
    if has_states:
        _shape_where_read(graph, stage, level)
    reads: list[dict[ir.Value, None]] = [{} for _ in range(len(markers) + 1)]
    for node in graph:
        here = next((stage[output] for output in node.outputs if output in stage), None)
        if node in batchless or here is None:
            continue
        for value in node.inputs:
            if value is None or value not in stage:
                continue
            made_by_attention = value.producer() in level
            if value is hidden or made_by_attention or stage[value] < here:
                reads[here][value] = None
    first = [v for v in reads[1] if v.producer() not in level]
    hidden_role = first.index(hidden) if hidden in first else 0
    # Layers with a state let different values cross than layers of attention beside them: there the place among them
    # does not tell which is `hidden`.
    stream = _stream(graph, hidden) if has_states else set[ir.Value]()
    spans = []
    names: dict[ir.Value, str] = {hidden: "hidden"}
    for index in range(len(markers) + 1):
        named = {v: "attention" if v.producer() in level else names.get(v) for v in reads[index]}
        inputs = {v: name for v, name in named.items() if name is not None}
        attentions = [maker for v in named if (maker := v.producer()) is not None and maker in level]
        if any(level[node] != index - 1 for node in attentions) or len(inputs) < len(named):
            raise InputError(
                f"cannot be split: the block before layer {index} reads what an earlier block "
                f"than the one before it made"
            )
        if index == len(markers):
            outputs = {"logits": graph.outputs[0]}
        else:
            # Roles are told apart by the order in which the next block reads them, so that equal blocks get equal
            # names.
            crossing = [v for v in reads[index + 1] if v.producer() not in level]
            if stream:  # what layers with two mixers hand over both
                later = dict.fromkeys(v for some in reads[index + 2 :] for v in some if v.producer() not in level)
                crossing += [v for v in later if stage[v] <= index and v not in crossing]
            hidden_role = next((n for n, v in enumerate(crossing) if v in stream), hidden_role)
            # As it came, and so no output of this block; elsewhere the embedding alone.
            kept = {v: name for v, name in names.items() if v in crossing and stream}
            free = (name for n in itertools.count(1) if (name := f"carry_{n}") not in kept.values())
            names = dict(kept)
            for n, v in enumerate(crossing):
                if v not in kept:
                    names[v] = "hidden" if n == hidden_role else next(free)
            cuts = points[index][0]
            if any(stage.get(v) != index for v in cuts):
                raise InputError(
                    f"cannot be split: query, key or value of layer {index} is made before the "
                    f"attention of layer {index - 1}"
                )
            outputs = {f"{names[v]}_out": v for v in crossing if v is not hidden and v not in kept} | dict(
                zip(_INPUTS[markers[index].op_type], cuts, strict=True)
            )
            if names.get(hidden, "hidden") != "hidden":
                raise InputError(
                    "cannot be split: the layers after the first read the embedding in another place than the first"
                )
        if flow.positions is not None and flow.positions in upstream(outputs.values(), inputs):
            inputs[flow.positions] = "position_ids"
        spans.append((inputs, outputs))
    return spans


def _stream(graph: ir.Graph, hidden: ir.Value) -> set[ir.Value]:
    """Return the residual stream: `hidden`, and what is added to it."""
    stream = {hidden}
    for node in graph:
        if node.op_type in ("Add", "Cast") and not stream.isdisjoint(node.inputs):
            stream.update(node.outputs)
    return stream


def _shape_where_read(graph: ir.Graph, stage: dict[ir.Value, int], level: Mapping[ir.Node, int]) -> None:
    """Let values cross a row a token, in place of `stage`: what is one value, shaped, is computed where it is read."""

    def sources(value: ir.Value) -> set[ir.Value]:
        node = value.producer()
        if node is None or node in level or node.op_type not in _SHAPED:
            return {value}
        return {source for given in node.inputs if given in stage for source in sources(given)}

    for node in reversed(list(graph)):
        value = node.outputs[0]
        if node.op_type in _SHAPED and value in stage and len(sources(value)) == 1:
            readers = [level[user] if user in level else stage.get(user.outputs[0]) for user in value.consumers()]
            first = min((reader for reader in readers if reader is not None), default=stage[value])
            stage[value] = max(stage[value], first)


def _hand_on(graph: ir.Graph, marker: ir.Node, cuts: list[ir.Value], stage: dict[ir.Value, int], index: int) -> None:
    """Let the block before a mixer hand on what the mixer takes of earlier blocks, in place."""
    for place, value in enumerate(cuts):
        if stage.get(value, index) < index:
            node = node_of("Identity", [value], shape_of(value), value.dtype)
            graph.insert_before(marker, node)
            marker.replace_input_with(place, node.outputs[0])
            cuts[place] = node.outputs[0]
            stage[node.outputs[0]] = index


def _compute_late(
    graph: ir.Graph, cuts: Sequence[ir.Value], stage: dict[ir.Value, int], index: int, attention: Collection[ir.Node]
) -> None:
    """Compute in the block before attention `index` what only it takes (Falcon-H1 beside its recurrence)."""
    if all(stage.get(value, index) == index for value in cuts):
        return
    needed = upstream(cuts, ())
    for node in reversed(list(graph)):
        readers = [user for value in node.outputs for user in value.consumers()]
        if not needed.isdisjoint(node.outputs) and all(
            user in attention or stage.get(user.outputs[0]) == index for user in readers
        ):
            stage.update({value: index for value in node.outputs if value in stage})


def _put_behind(index: int, stage: dict[ir.Value, int], cuts: Iterable[ir.Value], batchless: set[ir.Node]) -> None:
    """Move a parallel MLP from the block before an attention to the one behind.

    It is what attention `index` does not need from the block before it, and is moved where no more values cross the cut
    then. Several ranks then add it in one sum with the attention, and the exit computes no more of it than the rows of
    its logits.
    """

    def here(values: Iterable[ir.Value]) -> set[ir.Value]:
        """Return `values` of this block, and those that they are made of in it."""
        stops = batchless | {value for value, at in stage.items() if at != index}
        return {v for v in upstream(values, stops) if stage.get(v) == index and v.producer() is not None}

    def crossing(moved: Collection[ir.Value]) -> set[ir.Value]:
        """Return what the blocks behind the attention read of those before it."""

        def is_behind(value: ir.Value) -> bool:
            return stage.get(value, -1) > index or value in moved

        return {
            value
            for value in stage
            if not is_behind(value)
            and any(is_behind(node.outputs[0]) for node in value.consumers() if node not in batchless)
        }

    now = crossing(())
    free = here(now) - here(cuts)
    then = crossing(free)
    if len(then) <= len(now) and not any(value.producer() in batchless for value in then):
        stage.update(dict.fromkeys(free, index + 1))


def _batchless_graph(graph: ir.Graph, marker: ir.Node, cuts: list[ir.Value]) -> Batchless:
    if marker.op_type == "TokenWindow":
        return TokenWindow(number(shape_of(cuts[0])[1]), marker.attributes["width"].as_int(), dtype_of(cuts[0]))
    if marker.op_type != "Attention":
        sizes = {name: number(shape_of(value)[1]) for name, value in zip(_INPUTS[marker.op_type], cuts, strict=True)}
        return Recurrence(sizes, *(marker.attributes[name].as_int() for name in ("key_heads", "value_heads")))
    positions = next(value for value in graph.inputs if value.name == "position_ids")
    part = convenience.extract(graph, [*cuts, positions], [required(value) for value in marker.inputs])
    for value, name in zip(part.inputs, (*_ROLES, "position_ids"), strict=True):
        value.name = name
        value.shape = ir.Shape(["num_tokens", *shape_of(value)[1:]])
    query, key, values = (shape_of(given) for given in marker.inputs[:3])
    attributes = marker.attributes
    return BatchlessGraph(
        part,
        attributes["scale"].as_float(),
        attributes["softcap"].as_float(),
        attributes["window"].as_int(),
        number(query[1]),
        number(key[1]),
        number(query[2]),
        number(values[2]),
        len(marker.inputs) > len(_ROLES),
    )


def _pick_rows(part: ir.Graph) -> None:
    """Let the exit block start by taking the rows of `logit_rows [num_requests]`."""
    rows = ir.Value(name="logit_rows", shape=ir.Shape(["num_requests"]), type=ir.TensorType(ir.DataType.INT64))
    first = next(iter(part))
    for value in list(part.inputs):
        shape = ["num_requests", *shape_of(value)[1:]]
        pick = node_of("Gather", [value, rows], shape, value.dtype, [ir.AttrInt64("axis", 0)])
        value.replace_all_uses_with(pick.outputs[0])
        pick.replace_input_with(0, value)
        part.insert_before(first, pick)
    part.inputs.append(rows)
    part.outputs[0].shape = ir.Shape(["num_requests", *shape_of(part.outputs[0])[1:]])


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
    return f"{('current', 'previous')[back] if back < 2 else f'previous_{back}'}.{match[2]}"


def bind_slot(slot: str, layer: int, prefix: str) -> str:
    """Return the parameter that `slot` takes in the block before layer `layer`: the inverse of `_slot`."""
    match = re.fullmatch(r"(current|previous(?:_(\d+))?)\.(.+)", slot)
    if match is None:
        return slot
    back = 0 if match[1] == "current" else int(match[2] or 1)
    return f"{prefix}.{layer - back}.{match[3]}"
