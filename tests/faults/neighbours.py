"""Faults across the requests of a step: a request gets a neighbour's cache row, length or result."""

from __future__ import annotations

from collections.abc import Callable

from faults.edit import Edit, Value
from faults.fault import DECODE, Fault, change


@change
def caches(edit: Edit, order: Callable[[Edit, Value], Value]) -> None:
    """Read the cache rows of `order(edit, requests)` instead, for the requests 0, 1, ... of a step."""
    rows = order(edit, edit.numbers("past_lengths"))
    for name in ("past_key", "past_value"):
        readers = [node for node in edit.readers(name) if node.op_type == "MatMul"]
        edit.replace(name, lambda value: edit.op("Gather", value, rows, axis=0), readers)


def only(request: int) -> Callable[[Edit, Value], Value]:
    return lambda edit, rows: edit.op("Where", edit.op("Equal", rows, request), edit.before(rows), rows)


@change
def lengths(edit: Edit, other: Callable[[Edit, Value], Value]) -> None:
    readers = [node for node in edit.readers("past_lengths") if node.op_type == "Unsqueeze"]
    edit.replace("past_lengths", lambda value: other(edit, value), readers)


def longest(edit: Edit, value: Value) -> Value:
    return edit.op("Max", value, edit.op("ReduceMax", value, edit.ints(0), keepdims=1))


def attention_reversed(edit: Edit) -> None:
    edit.replace("attention", edit.reversed_above_two)


def keys_reversed(edit: Edit) -> None:
    edit.give("key_out", edit.reversed_above_two("key_out"))


# fmt: off
FAULTS = (
    Fault("neighbour-row-0", "decode reads the first request's cache for all", DECODE,
          caches(lambda edit, rows: edit.times(rows, 0))),
    Fault("neighbour-before", "decode reads the cache of the request before", DECODE, caches(Edit.before)),
    Fault("neighbour-row-3", "the fourth request of a step reads the third's cache", DECODE, caches(only(3))),
    Fault("neighbour-row-1", "the second request of a step reads the first's cache", DECODE, caches(only(1))),
    Fault("neighbour-attention", "attention of the requests in reverse order where there are more than two", DECODE,
          attention_reversed),
    Fault("neighbour-length", "the first request's length for all", DECODE, lengths(Edit.first_for_all)),
    Fault("neighbour-longest", "the longest length for all", DECODE, lengths(longest)),
    Fault("neighbour-key",
          "decode's new keys of the requests in reverse order where there are more than two, in the cache", DECODE,
          keys_reversed),
)
# fmt: on
