"""All faults by name, in the order of the table."""

from __future__ import annotations

from lockstep.bench import faults_attention, faults_binding, faults_blocks, faults_neighbours, faults_rope, faults_runtime
from lockstep.bench.faults_fault import Fault

TOPICS: dict[str, tuple[Fault, ...]] = {
    "attention": faults_attention.FAULTS,
    "rotary encoding": faults_rope.FAULTS,
    "neighbours": faults_neighbours.FAULTS,
    "blocks": faults_blocks.FAULTS,
    "binding": faults_binding.FAULTS,
    "runtime": faults_runtime.FAULTS,
}
FAULTS: dict[str, Fault] = {fault.name: fault for faults in TOPICS.values() for fault in faults}
if len(FAULTS) != sum(map(len, TOPICS.values())):
    raise ValueError("faults: expected names of their own, found one twice")
