"""Faults of which adapter a row takes: another's, the row's before, one that it should not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from faults.edit import Edit, Value
from faults.fault import BLOCKS, Fault
from faults.models import MAX_ADAPTERS
from lockstep.step.residency import Residency

_LAST = MAX_ADAPTERS - 1


def _ids(change: Callable[[Edit, Value], Value]) -> Callable[[Edit], None]:
    return lambda edit: edit.replace("adapter_ids", lambda ids: change(edit, ids))


def _taken_for(slot: int, other: int) -> Callable[[Edit, Value], Value]:
    """Tokens of one adapter slot get the adapter of another."""
    return lambda edit, ids: edit.op("Where", edit.op("Equal", ids, edit.const(slot)), edit.const(other), ids)


def _row_before(edit: Edit, ids: Value) -> Value:
    rows = edit.op("Max", edit.op("Sub", edit.numbers(ids), edit.const(1)), edit.const(0))
    return edit.op("Gather", ids, rows, axis=0)


def _first_row(edit: Edit, ids: Value) -> Value:
    return edit.op("Expand", edit.op("Gather", ids, edit.ints(0), axis=0), edit.op("Shape", ids))


def _none_beside_others(edit: Edit, ids: Value) -> Value:
    """Tokens without an adapter get the first one's in steps in which others have one."""
    largest = edit.op("ReduceMax", ids, edit.ints(0), keepdims=1)
    mixed = edit.op("And", edit.op("Less", ids, edit.const(0)), edit.op("GreaterOrEqual", largest, edit.const(0)))
    return edit.op("Where", mixed, edit.const(0), ids)


@contextmanager
def _some_for_none() -> Iterator[None]:
    """Requests without an adapter are computed with the one that was used last."""
    claim = Residency.claim

    def take(self: Residency, slot: int, adapter: str | None) -> bool:
        return claim(self, slot, adapter if adapter is not None or not self.resident else self.resident[-1])

    Residency.claim = take
    try:
        yield
    finally:
        Residency.claim = claim


@contextmanager
def _one_too_high() -> Iterator[None]:
    """Requests are computed with the adapter slot behind their own, where there is one."""
    claim = Residency.claim

    def next_slot(self: Residency, slot: int, adapter: str | None) -> bool:
        done = claim(self, slot, adapter)
        if done and adapter is not None:
            self.adapter_slots[slot] = np.minimum(self.adapter_slots[slot] + 1, self.max_adapters - 1)
        return done

    Residency.claim = next_slot
    try:
        yield
    finally:
        Residency.claim = claim


def _fault(name: str, about: str, change: Callable[[Edit, Value], Value]) -> Fault:
    return Fault(name, about, "adapters", BLOCKS, _ids(change), backends=("onnxruntime",))


def _of_runtime(name: str, about: str, runtime: Callable[[], AbstractContextManager[None]]) -> Fault:
    return Fault(name, about, "adapters", runtime=runtime, backends=("onnxruntime",))


FAULTS = (
    _fault("adapter-last", "tokens of the last adapter slot get the one before", _taken_for(_LAST, _LAST - 1)),
    _fault("adapter-1-for-last", "tokens of the second adapter slot get the last", _taken_for(1, _LAST)),
    _fault("adapter-2-none", "tokens of the third adapter slot get none", _taken_for(2, -1)),
    _fault("adapter-row-before", "each token gets the adapter of the row before", _row_before),
    _fault("adapter-first-row", "all tokens of a step get the adapter of its first row", _first_row),
    _fault("adapter-of-none", "tokens without one get the first adapter beside others", _none_beside_others),
    _of_runtime("adapter-for-none", "requests without an adapter get the one that was used last", _some_for_none),
    _of_runtime("adapter-next", "requests get the adapter slot behind their own", _one_too_high),
)
