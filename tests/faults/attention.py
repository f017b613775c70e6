"""Faults of attention itself: scale, soft cap, heads, masks, windows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from onnx import NodeProto

from faults.edit import Edit, Value
from faults.fault import ATTENTION, DECODE, PREFILL, Fault, change

Heads = Callable[[int, int], list[int]]  # of (heads, kv heads) the order in which heads are read


def scale_node(edit: Edit) -> NodeProto:
    """Return the product of the query with the scale: a scalar constant, in front of the grouping of heads."""

    def is_scale(node: NodeProto) -> bool:
        constants = [edit.constant(name) for name in node.input]
        is_scaled = any(array is not None and array.ndim == 0 for array in constants)
        return is_scaled and any(reader.op_type == "Reshape" for reader in edit.readers(node.output[0]))

    return next(filter(is_scale, edit.nodes("Mul")))


def masked_scores(edit: Edit) -> NodeProto:
    """Where(allowed, scores, lowest)."""
    return next(node for node in edit.nodes("Where") if edit.is_float(node.output[0]))


def filled(edit: Edit) -> NodeProto:
    """Less(rows of the cache, past_lengths)."""
    rows = edit.nodes("Range")[0].output[0]
    return next(node for node in edit.nodes("Less") if node.input[0] == rows)


def distance(edit: Edit) -> Value:
    """Return the distance from a key to the token that looks at it.

    [num_tokens, num_keys] in prefill, [num_requests, past_capacity] in decode.
    """
    if edit.graph.name == "prefill":
        return edit.nodes("Sub")[0].output[0]
    rows, lengths = filled(edit).input
    return edit.op("Sub", lengths, rows)


def hide(edit: Edit, mask: Value) -> None:
    """Allow only keys that `mask` (in the shape of `distance`) allows too."""
    if edit.graph.name == "decode":
        mask = edit.op("Unsqueeze", mask, edit.ints(1, 2))
    where = masked_scores(edit)
    where.input[0] = edit.op("And", where.input[0], mask)


@change
def scaled(edit: Edit, factor: float) -> None:
    node = scale_node(edit)
    place, scale = edit.constant_of(node)
    edit.set_constant(node, place, scale * np.asarray(factor, scale.dtype))


def cap_factor(edit: Edit) -> None:
    for node in [*edit.nodes("Div"), *(edit.reader(tanh.output[0], "Mul") for tanh in edit.nodes("Tanh"))]:
        place, cap = edit.constant_of(node)
        edit.set_constant(node, place, cap * 1.1)


def cap_dropped(edit: Edit) -> None:
    for tanh in edit.nodes("Tanh"):
        scores = edit.producer(tanh.input[0]).input[0]
        capped = edit.reader(tanh.output[0], "Mul").output[0]
        edit.replace(capped, lambda value, scores=scores: scores)


def cap_behind_mask(edit: Edit) -> None:
    where = masked_scores(edit)
    divided = edit.producer(edit.nodes("Tanh")[0].input[0])
    scores, (_, cap) = divided.input[0], edit.constant_of(divided)
    where.input[1] = scores

    def capped(value: Value) -> Value:
        return edit.times(edit.op("Tanh", edit.op("Div", value, edit.like(value, cap))), float(cap))

    edit.replace(where.output[0], capped)


@change
def heads(edit: Edit, order: Heads, *inputs: str) -> None:
    """Read the flat heads of query, key or value in another order."""
    numbers = order(edit.spec["num_heads"], edit.spec["num_kv_heads"])
    for name in inputs:
        dim = edit.spec["value_head_dim" if name == "value" else "head_dim"]
        columns = np.concatenate([np.arange(head * dim, (head + 1) * dim) for head in numbers])
        edit.replace(name, lambda value, columns=columns: edit.op("Gather", value, edit.const(columns), axis=1))


def first_two_swapped(num_heads: int, kv_heads: int) -> list[int]:
    return [1, 0, *range(2, num_heads)]


def interleaved(num_heads: int, kv_heads: int) -> list[int]:
    """Take query head i to the KV head i modulo their number, not to i divided by the size of a group."""
    return [*itertools.chain(*(range(group, num_heads, kv_heads) for group in range(kv_heads)))]


def reversed_kv(num_heads: int, kv_heads: int) -> list[int]:
    return list(range(kv_heads))[::-1]


def softmax_across_queries(edit: Edit) -> None:
    next(attribute for attribute in edit.nodes("Softmax")[0].attribute if attribute.name == "axis").i = -2


@change
def nearest_seen(edit: Edit, distance: int) -> None:
    """Have a prompt's token see the keys from this distance on; 0 is right."""
    edit.set_constant(edit.nodes("GreaterOrEqual")[0], 1, np.array(distance))


def new_token_hidden(edit: Edit) -> None:
    together = edit.producer(edit.nodes("Softmax")[0].input[0])
    new = together.input[1]
    together.input[1] = edit.op("Add", edit.times(new, 0.0), edit.like(new, -3e38))


def mask_dropped(edit: Edit) -> None:
    where = masked_scores(edit)
    edit.replace(where.output[0], lambda value: where.input[1])


def first_token_hidden(edit: Edit) -> None:
    """Hide the key at position 0 from all but itself."""
    off = distance(edit)
    position = edit.column("position_ids") if edit.graph.name == "prefill" else filled(edit).input[1]
    is_first = edit.op("Equal", off, position)
    hide(edit, edit.op("Or", edit.op("Not", is_first), edit.op("Equal", off, 0)))


@change
def past_is(edit: Edit, mask: Callable[[Edit, Value, Value], Value], filled_too: bool = False) -> None:
    """See the rows of the cache that `seen(edit, rows, lengths)` has; filled_too: and that are filled."""
    node = filled(edit)
    rows, lengths = node.input
    edit.replace(
        node.output[0],
        lambda value: edit.all_of(value, mask(edit, rows, lengths)) if filled_too else mask(edit, rows, lengths),
    )


def of_past(mask: Callable[[Edit, Value, Value], Value]) -> Callable[[Edit], None]:
    """Of the filled rows of the cache, see those that `seen` has."""
    return past_is(mask, True)


def rows_below(limit: int) -> Callable[[Edit], None]:
    return of_past(lambda edit, rows, lengths: edit.op("Less", rows, limit))


def all_but_last_of_capacity(count: int) -> Callable[[Edit], None]:
    return of_past(lambda edit, rows, lengths: edit.op("Less", rows, edit.op("Sub", edit.size("past_key", 2), count)))


def last_of_past_dropped() -> Callable[[Edit], None]:
    return of_past(lambda edit, rows, lengths: edit.op("Less", rows, edit.op("Sub", lengths, 1)))


def chunk_alone(edit: Edit) -> None:
    """Past rows are hidden by position, from the chunk's second token on."""
    first = edit.op("Gather", "position_ids", edit.ints(0), axis=0)
    within = edit.op("Add", edit.op("Sub", edit.column("position_ids"), first), 1)
    in_chunk = edit.op("Less", distance(edit), within)
    hide(edit, edit.op("Or", in_chunk, edit.op("Equal", edit.column("position_ids"), first)))


def windows(edit: Edit) -> list[tuple[NodeProto, int]]:
    """Comparisons with a window: Less(distance, window)."""
    constants = [(node, edit.constant(node.input[1])) for node in edit.nodes("Less")]
    return [(node, int(array)) for node, array in constants if array is not None and array.ndim == 0]


@change
def window_by(edit: Edit, step: int) -> None:
    for node, window in windows(edit):
        edit.set_constant(node, 1, np.array(window + step))


def window_removed(edit: Edit) -> None:
    for node, _ in windows(edit):
        reader = edit.reader(node.output[0], "And")
        condition = next(name for name in reader.input if name != node.output[0])
        edit.replace(reader.output[0], lambda value, value_of_condition=condition: value_of_condition)


@change
def window_added(edit: Edit, window: int) -> None:
    hide(edit, edit.op("Less", distance(edit), window))


@change
def at_position(edit: Edit, position: int, instead: float) -> None:
    """Give `instead` as attention at a position."""
    edit.replace("attention", lambda value: edit.rows_where(value, edit.op("Equal", "position_ids", position), instead))


def first_position_halved(edit: Edit) -> None:
    is_first = edit.op("Equal", "position_ids", 0)
    edit.replace("attention", lambda value: edit.rows_where(value, is_first, edit.times(value, 0.5)))


@change
def rows_from(edit: Edit, first: int, output: Value) -> None:
    """Give zero in an output's rows from `first` on."""
    edit.replace(
        output, lambda value: edit.rows_where(value, edit.op("GreaterOrEqual", edit.numbers(value), first), 0.0)
    )


NAN = float("nan")
INFINITY = float("inf")
# fmt: off
FAULTS = (
    Fault("scale-0.99", "scores scaled by 0.99", ATTENTION, scaled(0.99)),
    Fault("scale-1.01", "scores scaled by 1.01", ATTENTION, scaled(1.01)),
    Fault("scale-sqrt-2", "scores scaled by the square root of 2", ATTENTION, scaled(2**0.5)),
    Fault("scale-decode", "scores scaled by 1.05 in decode alone", DECODE, scaled(1.05)),
    Fault("softcap-1.1", "soft cap of the scores 10 % too high", ATTENTION, cap_factor, "gemma2"),
    Fault("softcap-dropped", "soft cap of the scores left out", ATTENTION, cap_dropped, "gemma2"),
    Fault("softcap-behind-mask", "soft cap behind the mask, which it lifts", PREFILL, cap_behind_mask, "gemma2"),
    Fault("heads-swapped", "query heads 0 and 1 swapped", ATTENTION, heads(first_two_swapped, "query")),
    Fault("heads-interleaved", "query heads mapped to KV heads by their remainder", ATTENTION,
          heads(interleaved, "query")),
    Fault("kv-heads-swapped", "KV heads in reverse order", ATTENTION, heads(reversed_kv, "key", "value")),
    Fault("kv-heads-swapped-decode", "KV heads in reverse order in decode alone", DECODE,
          heads(reversed_kv, "key", "value")),
    Fault("value-heads-swapped", "heads of the values in reverse order", ATTENTION, heads(reversed_kv, "value")),
    Fault("softmax-axis", "softmax over the queries", PREFILL, softmax_across_queries),
    Fault("future-seen", "each token sees the next one", PREFILL, nearest_seen(-1)),
    Fault("mask-dropped", "no mask in prefill", PREFILL, mask_dropped),
    Fault("mask-dropped-decode", "no mask in decode", DECODE, mask_dropped),
    Fault("itself-hidden", "a prompt's token does not see itself", PREFILL, nearest_seen(1)),
    Fault("itself-hidden-decode", "a decoded token does not see itself", DECODE, new_token_hidden),
    Fault("first-token-hidden", "the key at position 0 is hidden", ATTENTION, first_token_hidden),
    Fault("last-of-past-dropped", "decode drops the last row of the past", DECODE, last_of_past_dropped()),
    Fault("last-of-past-dropped-prefill", "a chunk drops the last row of the past", PREFILL, last_of_past_dropped()),
    Fault("row-behind-past-seen", "decode sees one row behind the past", DECODE,
          past_is(lambda edit, rows, lengths: edit.op("LessOrEqual", rows, lengths))),
    Fault("rows-from-64", "decode forgets cache rows from 64 on", DECODE, rows_below(64)),
    Fault("rows-from-128", "decode forgets cache rows from 128 on", DECODE, rows_below(128)),
    Fault("rows-from-200", "decode forgets cache rows from 200 on", DECODE, rows_below(200)),
    Fault("rows-from-64-prefill", "chunks forget cache rows from 64 on", PREFILL, rows_below(64)),
    Fault("rows-from-128-prefill", "chunks forget cache rows from 128 on", PREFILL, rows_below(128)),
    Fault("row-64", "decode forgets cache row 64", DECODE,
          of_past(lambda edit, rows, lengths: edit.op("Not", edit.op("Equal", rows, 64)))),
    Fault("capacity-1", "decode never sees the last row of the capacity", DECODE, all_but_last_of_capacity(1)),
    Fault("capacity-2", "decode never sees the last two rows of the capacity", DECODE, all_but_last_of_capacity(2),
          gate="golden"),
    Fault("past-ignored", "a chunk ignores its past", PREFILL,
          past_is(lambda edit, rows, lengths: edit.op("Less", rows, edit.times(lengths, 0)))),
    Fault("past-empty-rows-seen", "a chunk takes the whole capacity for filled", PREFILL,
          past_is(lambda edit, rows, lengths: edit.op("GreaterOrEqual", rows, 0))),
    Fault("past-second-half", "a chunk sees the second half of its past only", PREFILL,
          of_past(lambda edit, rows, lengths: edit.op("GreaterOrEqual", rows, edit.op("Div", lengths, 2)))),
    Fault("past-first-token-only", "in a chunk only the first token sees the past", PREFILL, chunk_alone),
    Fault("window-300-plus-1", "window of 300 taken for 301", ATTENTION, window_by(1), "window"),
    Fault("window-300-minus-1", "window of 300 taken for 299", ATTENTION, window_by(-1), "window"),
    Fault("window-300-removed", "window of 300 left out", ATTENTION, window_removed, "window"),
    Fault("window-300-removed-decode", "window of 300 left out in decode alone", DECODE, window_removed, "window"),
    Fault("window-300-minus-1-prefill", "window of 300 taken for 299 in prefill alone", PREFILL, window_by(-1),
          "window"),
    Fault("window-16-plus-1", "window of 16 taken for 17", ("attention.*",), window_by(1), "gemma2"),
    Fault("window-16-minus-1", "window of 16 taken for 15", ("attention.*",), window_by(-1), "gemma2"),
    Fault("window-16-removed", "window of 16 left out", ("attention.*",), window_removed, "gemma2"),
    Fault("window-16-added", "a window of 16 where the model has none", ("attention_2.*",), window_added(16), "gemma2"),
    Fault("window-128-added", "a window of 128 where the model has none", ATTENTION, window_added(128)),
    Fault("window-200-added", "a window of 200 where the model has none", ATTENTION, window_added(200)),
    Fault("first-position", "attention of position 0 halved", ATTENTION, first_position_halved),
    Fault("last-position", "attention of position 255 is zero", ATTENTION, at_position(255, 0.0)),
    Fault("last-position-decode", "attention of position 255 is zero in decode alone", DECODE, at_position(255, 0.0)),
    Fault("nan-at-100", "NaN at position 100", ATTENTION, at_position(100, NAN), gate="golden"),
    Fault("infinity-at-180", "infinity at position 180 in decode", DECODE, at_position(180, INFINITY), gate="golden"),
    Fault("tokens-from-128", "attention of a piece's tokens from the 128th on is zero", PREFILL,
          rows_from(127, "attention"), gate="golden"),
)
# fmt: on
