"""Faults of attention itself: scale, soft cap, heads, masks, windows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto

from faults.edit import Edit, Value
from faults.fault import ATTENTION, DECODE, PREFILL, Fault


def scale_node(edit: Edit) -> NodeProto:
    """Return the product of the query with the scale.

    A scalar constant, in front of the grouping of heads.
    """
    return next(
        node for node in edit.nodes("Mul")
        if any((array := edit.constant(name)) is not None and array.ndim == 0 for name in node.input)
        and any(reader.op_type == "Reshape" for reader in edit.readers(node.output[0]))
    )  # fmt: skip


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


def hide(edit: Edit, seen: Value) -> None:
    """Allow only what `seen` (as `distance`) allows too."""
    if edit.graph.name == "decode":
        seen = edit.op("Unsqueeze", seen, edit.ints(1, 2))
    where = masked_scores(edit)
    where.input[0] = edit.op("And", where.input[0], seen)


def at_rows(edit: Edit, output: Value, chosen: Callable[[Value], Value], instead: float) -> None:
    """Give `instead` in the rows of an output whose position is `chosen`."""
    edit.replace(output, lambda value: edit.rows_where(value, chosen("position_ids"), instead))


def _scaled(factor: float) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        node = scale_node(edit)
        place, scale = edit.constant_of(node)
        edit.set_constant(node, place, scale * np.asarray(factor, scale.dtype))

    return plant


def _cap_factor(edit: Edit) -> None:
    for node in [*edit.nodes("Div"), *(edit.reader(tanh.output[0], "Mul") for tanh in edit.nodes("Tanh"))]:
        place, cap = edit.constant_of(node)
        edit.set_constant(node, place, cap * 1.1)


def _cap_dropped(edit: Edit) -> None:
    for tanh in edit.nodes("Tanh"):
        scores, capped = edit.producer(tanh.input[0]).input[0], edit.reader(tanh.output[0], "Mul").output[0]
        edit.replace(capped, lambda value, scores=scores: scores)


def _cap_behind_mask(edit: Edit) -> None:
    where, tanh = masked_scores(edit), edit.nodes("Tanh")[0]
    divided = edit.producer(tanh.input[0])
    scores, (_, cap) = divided.input[0], edit.constant_of(divided)
    where.input[1] = scores

    def capped(value: Value) -> Value:
        return edit.times(edit.op("Tanh", edit.op("Div", value, edit.like(value, cap))), float(cap))

    edit.replace(where.output[0], capped)


def _columns(edit: Edit, name: str, heads: list[int]) -> Value:
    """Put the flat heads of query, key or value in another order."""
    dim = edit.spec["value_head_dim" if name == "value" else "head_dim"]
    numbers = np.concatenate([np.arange(head * dim, (head + 1) * dim) for head in heads])
    return edit.op("Gather", name, edit.const(numbers), axis=1)


def _heads(*changes: tuple[str, Callable[[int, int], list[int]]]) -> Callable[[Edit], None]:
    """Read the heads of inputs in another order: of (heads, kv heads) the order."""

    def plant(edit: Edit) -> None:
        counts = edit.spec["num_heads"], edit.spec["num_kv_heads"]
        for name, order in changes:
            edit.replace(name, lambda value, name=name, order=order: _columns(edit, name, order(*counts)))

    return plant


def _swap_first(heads: int, kv_heads: int) -> list[int]:
    return [1, 0, *range(2, heads)]


def _interleaved(heads: int, kv_heads: int) -> list[int]:
    """Take query head i to the KV head i modulo their number.

    Not to i divided by the size of a group.
    """
    return [head for group in range(kv_heads) for head in range(group, heads, kv_heads)]


def _kv_reversed(heads: int, kv_heads: int) -> list[int]:
    return list(range(kv_heads))[::-1]


def _softmax_across_queries(edit: Edit) -> None:
    next(attribute for attribute in edit.nodes("Softmax")[0].attribute if attribute.name == "axis").i = -2


def _future_seen(edit: Edit) -> None:
    node = edit.nodes("GreaterOrEqual")[0]
    edit.set_constant(node, 1, np.array(-1))


def _itself_hidden(edit: Edit) -> None:
    node = edit.nodes("GreaterOrEqual")[0]
    edit.set_constant(node, 1, np.array(1))


def _new_token_hidden(edit: Edit) -> None:
    softmax = edit.nodes("Softmax")[0]
    together = edit.producer(softmax.input[0])
    new = together.input[1]
    together.input[1] = edit.op("Add", edit.times(new, 0.0), edit.like(new, -3e38))


def _mask_dropped(edit: Edit) -> None:
    where = masked_scores(edit)
    edit.replace(where.output[0], lambda value: where.input[1])


def _first_token_hidden(edit: Edit) -> None:
    """Hide the key at position 0 from all but itself."""
    off = distance(edit)
    position = edit.column("position_ids") if edit.graph.name == "prefill" else filled(edit).input[1]
    is_first = edit.op("Equal", off, position)
    seen = edit.op("Or", edit.op("Not", is_first), edit.op("Equal", off, edit.const(0)))
    hide(edit, seen)


def _past_changed(change: Callable[[Edit, Value, Value], Value]) -> Callable[[Edit], None]:
    """Take `change(edit, rows, lengths)` for the filled rows of the cache."""

    def plant(edit: Edit) -> None:
        node = filled(edit)
        rows, lengths = node.input
        edit.replace(node.output[0], lambda value: change(edit, rows, lengths))

    return plant


def _past_narrowed(change: Callable[[Edit, Value, Value], Value]) -> Callable[[Edit], None]:
    """`change(edit, rows, lengths)`: which of the filled rows of the cache are seen."""

    def plant(edit: Edit) -> None:
        node = filled(edit)
        rows, lengths = node.input
        edit.replace(node.output[0], lambda value: edit.op("And", value, change(edit, rows, lengths)))

    return plant


def _rows_below(limit: int) -> Callable[[Edit], None]:
    return _past_narrowed(lambda edit, rows, lengths: edit.op("Less", rows, edit.const(limit)))


def _rows_below_capacity_less(few: int) -> Callable[[Edit], None]:
    def change(edit: Edit, rows: Value, lengths: Value) -> Value:
        return edit.op("Less", rows, edit.op("Sub", edit.size("past_key", 2), edit.const(few)))

    return _past_narrowed(change)


def _chunk_alone(edit: Edit) -> None:
    """Past rows are hidden by position, from the chunk's second token on."""
    first = edit.op("Gather", "position_ids", edit.ints(0), axis=0)
    own = edit.op(
        "Less", distance(edit), edit.op("Add", edit.op("Sub", edit.column("position_ids"), first), edit.const(1))
    )
    is_first = edit.op("Equal", edit.column("position_ids"), first)
    hide(edit, edit.op("Or", own, is_first))


def windows(edit: Edit) -> list[tuple[NodeProto, int]]:
    """Comparisons with a window: Less(distance, window)."""
    return [
        (node, int(array))
        for node in edit.nodes("Less")
        if (array := edit.constant(node.input[1])) is not None and array.ndim == 0
    ]


def _window_by(step: int) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        for node, window in windows(edit):
            edit.set_constant(node, 1, np.array(window + step))

    return plant


def _window_removed(edit: Edit) -> None:
    for node, _ in windows(edit):
        both = edit.reader(node.output[0], "And")
        rest = next(name for name in both.input if name != node.output[0])
        edit.replace(both.output[0], lambda value, rest=rest: rest)


def _window_added(window: int) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        hide(edit, edit.op("Less", distance(edit), edit.const(window)))

    return plant


FAULTS = (
    Fault("scale-0.99", "scores scaled by 0.99", graphs=ATTENTION, edit=_scaled(0.99)),
    Fault("scale-1.01", "scores scaled by 1.01", graphs=ATTENTION, edit=_scaled(1.01)),
    Fault("scale-sqrt-2", "scores scaled by the square root of 2", graphs=ATTENTION, edit=_scaled(2**0.5)),
    Fault("scale-decode", "scores scaled by 1.05 in decode alone", graphs=DECODE, edit=_scaled(1.05)),
    Fault("softcap-1.1", "soft cap of the scores 10 % too high", "gemma2", ATTENTION, _cap_factor),
    Fault("softcap-dropped", "soft cap of the scores left out", "gemma2", ATTENTION, _cap_dropped),
    Fault("softcap-behind-mask", "soft cap behind the mask, which it lifts", "gemma2", PREFILL, _cap_behind_mask),
    Fault("heads-swapped", "query heads 0 and 1 swapped", graphs=ATTENTION, edit=_heads(("query", _swap_first))),
    Fault(
        "heads-interleaved",
        "query heads mapped to KV heads by their remainder",
        graphs=ATTENTION,
        edit=_heads(("query", _interleaved)),
    ),
    Fault(
        "kv-heads-swapped",
        "KV heads in reverse order",
        graphs=ATTENTION,
        edit=_heads(("key", _kv_reversed), ("value", _kv_reversed)),
    ),
    Fault(
        "kv-heads-swapped-decode",
        "KV heads in reverse order in decode alone",
        graphs=DECODE,
        edit=_heads(("key", _kv_reversed), ("value", _kv_reversed)),
    ),
    Fault(
        "value-heads-swapped",
        "heads of the values in reverse order",
        graphs=ATTENTION,
        edit=_heads(("value", _kv_reversed)),
    ),
    Fault("softmax-axis", "softmax over the queries", graphs=PREFILL, edit=_softmax_across_queries),
    Fault("future-seen", "each token sees the next one", graphs=PREFILL, edit=_future_seen),
    Fault("mask-dropped", "no mask in prefill", graphs=PREFILL, edit=_mask_dropped),
    Fault("mask-dropped-decode", "no mask in decode", graphs=DECODE, edit=_mask_dropped),
    Fault("itself-hidden", "a prompt's token does not see itself", graphs=PREFILL, edit=_itself_hidden),
    Fault("itself-hidden-decode", "a decoded token does not see itself", graphs=DECODE, edit=_new_token_hidden),
    Fault("first-token-hidden", "the key at position 0 is hidden", graphs=ATTENTION, edit=_first_token_hidden),
    Fault(
        "last-of-past-dropped",
        "decode drops the last row of the past",
        graphs=DECODE,
        edit=_past_narrowed(lambda edit, rows, lengths: edit.op("Less", rows, edit.op("Sub", lengths, edit.const(1)))),
    ),
    Fault(
        "last-of-past-dropped-prefill",
        "a chunk drops the last row of the past",
        graphs=PREFILL,
        edit=_past_narrowed(lambda edit, rows, lengths: edit.op("Less", rows, edit.op("Sub", lengths, edit.const(1)))),
    ),
    Fault(
        "row-behind-past-seen",
        "decode sees one row behind the past",
        graphs=DECODE,
        edit=_past_changed(lambda edit, rows, lengths: edit.op("LessOrEqual", rows, lengths)),
    ),
    Fault("rows-from-64", "decode forgets cache rows from 64 on", graphs=DECODE, edit=_rows_below(64)),
    Fault("rows-from-128", "decode forgets cache rows from 128 on", graphs=DECODE, edit=_rows_below(128)),
    Fault("rows-from-200", "decode forgets cache rows from 200 on", graphs=DECODE, edit=_rows_below(200)),
    Fault("rows-from-64-prefill", "chunks forget cache rows from 64 on", graphs=PREFILL, edit=_rows_below(64)),
    Fault("rows-from-128-prefill", "chunks forget cache rows from 128 on", graphs=PREFILL, edit=_rows_below(128)),
    Fault(
        "row-64",
        "decode forgets cache row 64",
        graphs=DECODE,
        edit=_past_narrowed(lambda edit, rows, lengths: edit.op("Not", edit.op("Equal", rows, edit.const(64)))),
    ),
    Fault(
        "capacity-1", "decode never sees the last row of the capacity", graphs=DECODE, edit=_rows_below_capacity_less(1)
    ),
    Fault(
        "capacity-2",
        "decode never sees the last two rows of the capacity",
        graphs=DECODE,
        edit=_rows_below_capacity_less(2),
    ),
    Fault(
        "past-ignored",
        "a chunk ignores its past",
        graphs=PREFILL,
        edit=_past_changed(lambda edit, rows, lengths: edit.op("Less", rows, edit.times(lengths, edit.const(0)))),
    ),
    Fault(
        "past-empty-rows-seen",
        "a chunk takes the whole capacity for filled",
        graphs=PREFILL,
        edit=_past_changed(lambda edit, rows, lengths: edit.op("GreaterOrEqual", rows, edit.const(0))),
    ),
    Fault(
        "past-second-half",
        "a chunk sees the second half of its past only",
        graphs=PREFILL,
        edit=_past_narrowed(
            lambda edit, rows, lengths: edit.op("GreaterOrEqual", rows, edit.op("Div", lengths, edit.const(2)))
        ),
    ),
    Fault("past-first-token-only", "in a chunk only the first token sees the past", graphs=PREFILL, edit=_chunk_alone),
    Fault("window-300-plus-1", "window of 300 taken for 301", "window", ATTENTION, _window_by(1)),
    Fault("window-300-minus-1", "window of 300 taken for 299", "window", ATTENTION, _window_by(-1)),
    Fault("window-300-removed", "window of 300 left out", "window", ATTENTION, _window_removed),
    Fault("window-300-removed-decode", "window of 300 left out in decode alone", "window", DECODE, _window_removed),
    Fault(
        "window-300-minus-1-prefill", "window of 300 taken for 299 in prefill alone", "window", PREFILL, _window_by(-1)
    ),
    Fault("window-16-plus-1", "window of 16 taken for 17", "gemma2", ("attention.*",), _window_by(1)),
    Fault("window-16-minus-1", "window of 16 taken for 15", "gemma2", ("attention.*",), _window_by(-1)),
    Fault("window-16-removed", "window of 16 left out", "gemma2", ("attention.*",), _window_removed),
    Fault(
        "window-16-added", "a window of 16 where the model has none", "gemma2", ("attention_2.*",), _window_added(16)
    ),
    Fault("window-128-added", "a window of 128 where the model has none", graphs=ATTENTION, edit=_window_added(128)),
    Fault("window-200-added", "a window of 200 where the model has none", graphs=ATTENTION, edit=_window_added(200)),
    Fault(
        "first-position",
        "attention of position 0 halved",
        graphs=ATTENTION,
        edit=lambda edit: edit.replace(
            "attention",
            lambda value: edit.rows_where(
                value, edit.op("Equal", "position_ids", edit.const(0)), edit.times(value, 0.5)
            ),
        ),
    ),
    Fault(
        "last-position",
        "attention of position 255 is zero",
        graphs=ATTENTION,
        edit=lambda edit: at_rows(
            edit, "attention", lambda positions: edit.op("Equal", positions, edit.const(255)), 0.0
        ),
    ),
    Fault(
        "last-position-decode",
        "attention of position 255 is zero in decode alone",
        graphs=DECODE,
        edit=lambda edit: at_rows(
            edit, "attention", lambda positions: edit.op("Equal", positions, edit.const(255)), 0.0
        ),
    ),
    Fault(
        "nan-at-100",
        "NaN at position 100",
        graphs=ATTENTION,
        edit=lambda edit: at_rows(
            edit, "attention", lambda positions: edit.op("Equal", positions, edit.const(100)), float("nan")
        ),
    ),
    Fault(
        "infinity-at-180",
        "infinity at position 180 in decode",
        graphs=DECODE,
        edit=lambda edit: at_rows(
            edit, "attention", lambda positions: edit.op("Equal", positions, edit.const(180)), float("inf")
        ),
    ),
    Fault(
        "tokens-from-128",
        "attention of a piece's tokens from the 128th on is zero",
        graphs=PREFILL,
        edit=lambda edit: edit.replace(
            "attention",
            lambda value: edit.rows_where(value, edit.op("GreaterOrEqual", edit.numbers(value), edit.const(127)), 0.0),
        ),
    ),
)
