"""Faults of one product that is a little too large: what a tolerance lets through, if it lets anything through.

In every precision, on every backend.
"""

from __future__ import annotations

from faults.edit import Edit, Value
from faults.fault import MIDDLE, Fault, replaced

FACTORS = (1.02, 1.04, 1.2, 1.5)
_HOST = ("onnxruntime", "openvino")
_ALL = ("fp32", "fp16", "bf16", "w8a16", "w4a16", "w8a8", "w4a8", "w8a8-fp8")


def query_times(factor: float, precisions: tuple[str, ...] = _ALL) -> Fault:
    """Return the fault of queries that are too large in one layer."""

    def larger(edit: Edit, value: Value) -> Value:
        return edit.times(value, factor)

    change = replaced("query", larger)
    return Fault(
        f"query-{factor}", f"queries of a layer times {factor}", MIDDLE, change, precisions=precisions, backends=_HOST
    )


FAULTS = tuple(query_times(factor) for factor in FACTORS)
