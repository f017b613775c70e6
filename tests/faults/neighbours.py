"""Faults across the requests of a step, which take what is a neighbour's.

A row of the cache, a length or a result.
"""

from __future__ import annotations

from collections.abc import Callable

from faults.edit import Edit, Value
from faults.fault import DECODE, Fault


def _caches(order: Callable[[Edit, Value], Value]) -> Callable[[Edit], None]:
    """Read the cache rows of `order(edit, requests)` instead.

    For the requests 0, 1, ... of a step.
    """

    def plant(edit: Edit) -> None:
        chosen = order(edit, edit.numbers("past_lengths"))
        for name in ("past_key", "past_value"):
            edit.replace(
                name,
                lambda value: edit.op("Gather", value, chosen, axis=0),
                [node for node in edit.readers(name) if node.op_type == "MatMul"],
            )

    return plant


def _before(edit: Edit, requests: Value) -> Value:
    return edit.op("Max", edit.op("Sub", requests, edit.const(1)), edit.const(0))


def _only(request: int) -> Callable[[Edit, Value], Value]:
    def order(edit: Edit, requests: Value) -> Value:
        return edit.op("Where", edit.op("Equal", requests, edit.const(request)), _before(edit, requests), requests)

    return order


def swapped_above_two(edit: Edit, value: Value) -> Value:
    """Return the rows of a value, in reverse order where there are more than two."""
    rows = edit.numbers(value)
    count = edit.size(value)
    back = edit.op("Sub", edit.op("Sub", count, edit.const(1)), rows)
    return edit.op("Gather", value, edit.op("Where", edit.op("Greater", count, edit.const(2)), back, rows), axis=0)


def _lengths(change: Callable[[Edit, Value], Value]) -> Callable[[Edit], None]:
    return lambda edit: edit.replace(
        "past_lengths",
        lambda value: change(edit, value),
        [node for node in edit.readers("past_lengths") if node.op_type == "Unsqueeze"],
    )


def _first_length(edit: Edit, lengths: Value) -> Value:
    return edit.op("Expand", edit.op("Gather", lengths, edit.ints(0), axis=0), edit.op("Shape", lengths))


FAULTS = (
    Fault(
        "neighbour-row-0",
        "decode reads the first request's cache for all",
        graphs=DECODE,
        edit=_caches(lambda edit, rows: edit.times(rows, edit.const(0))),
    ),
    Fault("neighbour-before", "decode reads the cache of the request before", graphs=DECODE, edit=_caches(_before)),
    Fault(
        "neighbour-row-3", "the fourth request of a step reads the third's cache", graphs=DECODE, edit=_caches(_only(3))
    ),
    Fault(
        "neighbour-row-1", "the second request of a step reads the first's cache", graphs=DECODE, edit=_caches(_only(1))
    ),
    Fault(
        "neighbour-attention",
        "attention of the requests in reverse order where there are more than two",
        graphs=DECODE,
        edit=lambda edit: edit.replace("attention", lambda value: swapped_above_two(edit, value)),
    ),
    Fault("neighbour-length", "the first request's length for all", graphs=DECODE, edit=_lengths(_first_length)),
    Fault(
        "neighbour-longest",
        "the longest length for all",
        graphs=DECODE,
        edit=_lengths(
            lambda edit, lengths: edit.op("Max", lengths, edit.op("ReduceMax", lengths, edit.ints(0), keepdims=1))
        ),
    ),
    Fault(
        "neighbour-key",
        "decode's new keys of the requests in reverse order where there are more than two, in the cache",
        graphs=DECODE,
        edit=lambda edit: edit.give("key_out", swapped_above_two(edit, "key_out")),
    ),
)
