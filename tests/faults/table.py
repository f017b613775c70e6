"""All faults, in the order of the page."""

from __future__ import annotations

from faults import (
    adapters,
    assembly,
    attention,
    between,
    blocks,
    experts,
    moved,
    neighbours,
    quantized,
    rope,
    runtime,
    scaled,
)
from faults.fault import Fault

ROWS: tuple[Fault, ...] = (
    *attention.FAULTS, *rope.FAULTS, *neighbours.FAULTS, *blocks.FAULTS, *between.FAULTS, *experts.FAULTS,
    *assembly.FAULTS, *quantized.FAULTS, *scaled.FAULTS, *runtime.FAULTS, *assembly.RANKS, *runtime.RANKS,
    *adapters.FAULTS, *moved.FAULTS,
)  # fmt: skip
FAULTS: dict[str, Fault] = {fault.name: fault for fault in ROWS}
