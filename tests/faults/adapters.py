"""Faults of which adapter a row takes: another's, the row's before, one that it should not have."""

from __future__ import annotations

from functools import partial

import numpy as np

from faults.between import taken_for
from faults.edit import Edit, Value
from faults.fault import BLOCKS, HOST, RUNTIME, Fault, replaced
from faults.models import MAX_ADAPTERS
from faults.runtime import instead
from lockstep.step.residency import Residency

_LAST = MAX_ADAPTERS - 1


def of_the_row_before(edit: Edit, ids: Value) -> Value:
    return edit.op("Gather", ids, edit.before(edit.numbers(ids)), axis=0)


def none_beside_others(edit: Edit, ids: Value) -> Value:
    """Tokens without an adapter get the first one's in steps in which others have one."""
    largest = edit.op("ReduceMax", ids, edit.ints(0), keepdims=1)
    mixed = edit.all_of(edit.op("Less", ids, 0), edit.op("GreaterOrEqual", largest, 0))
    return edit.op("Where", mixed, 0, ids)


def some_for_none(claim):
    """Requests without an adapter are computed with the one that was used last."""
    return lambda self, slot, adapter: claim(
        self, slot, adapter if adapter is not None or not self.resident else self.resident[-1]
    )


def one_too_high(claim):
    """Requests are computed with the adapter slot behind their own, where there is one."""

    def next_slot(self, slot, adapter):
        done = claim(self, slot, adapter)
        if done and adapter is not None:
            self.places[slot] = np.minimum(self.places[slot] + 1, self.num_places - 1)
        return done

    return next_slot


def ids(other):
    return replaced("adapter_ids", other)


fault = partial(Fault, model="adapters", backends=HOST)
# fmt: off
FAULTS = (
    fault("adapter-last", "tokens of the last adapter slot get the one before", BLOCKS,
          ids(taken_for(_LAST, _LAST - 1))),
    fault("adapter-1-for-last", "tokens of the second adapter slot get the last", BLOCKS, ids(taken_for(1, _LAST))),
    fault("adapter-2-none", "tokens of the third adapter slot get none", BLOCKS, ids(taken_for(2, -1))),
    fault("adapter-row-before", "each token gets the adapter of the row before", BLOCKS, ids(of_the_row_before)),
    fault("adapter-first-row", "all tokens of a step get the adapter of its first row", BLOCKS,
          ids(Edit.first_for_all)),
    fault("adapter-of-none", "tokens without one get the first adapter beside others", BLOCKS, ids(none_beside_others)),
    fault("adapter-for-none", "requests without an adapter get the one that was used last", RUNTIME,
          instead(Residency, "claim", some_for_none), gate="adapted"),
    fault("adapter-next", "requests get the adapter slot behind their own", RUNTIME,
          instead(Residency, "claim", one_too_high), gate="adapted"),
)
# fmt: on
