"""All faults by name, in the order of the table."""

from __future__ import annotations

from faults import adapters, attention, between, binding, blocks, neighbours, quantized, ranks, rope, runtime
from faults.fault import Fault

TOPICS: dict[str, tuple[Fault, ...]] = {
    "attention": attention.FAULTS,
    "rotary encoding": rope.FAULTS,
    "neighbours": neighbours.FAULTS,
    "blocks": blocks.FAULTS,
    "between the edges": between.FAULTS,
    "binding": binding.FAULTS,
    "quantised weights": quantized.FAULTS,
    "runtime": runtime.FAULTS,
    "ranks": ranks.FAULTS,
    "adapters": adapters.FAULTS,
}
FAULTS: dict[str, Fault] = {fault.name: fault for faults in TOPICS.values() for fault in faults}
if len(FAULTS) != sum(map(len, TOPICS.values())):
    raise ValueError("faults: expected names of their own, found one twice")
