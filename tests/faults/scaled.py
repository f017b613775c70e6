"""Faults of one product that is a little too large: what a tolerance lets through, if it lets anything through."""

from __future__ import annotations

from functools import partial

from faults.edit import Edit, Value
from faults.fault import HOST, MIDDLE, Fault, replaced

FACTORS = (1.02, 1.04, 1.2, 1.5)


def times(edit: Edit, value: Value, factor: float) -> Value:
    return edit.times(value, factor)


def query_times(factor: float) -> Fault:
    """Return the fault of queries that are too large in one layer."""
    change = replaced("query", partial(times, factor=factor))
    about = f"queries of a layer times {factor}"
    return Fault(f"query-{factor}", about, MIDDLE, change, backends=HOST)


FAULTS = tuple(query_times(factor) for factor in FACTORS)
