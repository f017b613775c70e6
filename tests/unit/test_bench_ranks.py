"""`python -m benchmarks ranks`: from shapes to the table of aims, on fake devices."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import ranks


def case(scale: float) -> dict[str, Any]:
    """Measured on a GPU `scale` times as fast as just enough for the 70B shape."""
    rate = lambda value: {"tokens_per_second": scale * value}
    return {
        "device": {"name": "GPU"},
        "backend": "tensorrt",
        "versions": {"tensorrt": "10.9.0"},
        "build_seconds": 60 / scale,
        "ready_seconds": 60 / scale,
        "decode": {"1": rate(92), "16": rate(1300)},
        "prompt": {"milliseconds": {"median": 135 / scale}},
        "check": {
            layers: {"max_logit_error": 0.2 / scale, "max_logit_error_of_transformers_fp16": 0.1}
            for layers in ("2", "16")
        },
    }


@pytest.mark.parametrize(("scale", "met"), [(1, True), (1.01, True), (0.99, False)])
def test_each_aim_is_judged_by_its_own_figure(scale: float, met: bool) -> None:
    shape = "llama-3-70b"
    rows = [row for row in ranks.record_of({shape: {"4": case(scale)}}, False)["aims"] if row["shape"] == shape]
    aims = [row for row in rows if row["at_least"] or row["at_most"]]
    assert len(aims) == 7 and {row["met"] for row in aims} == {met}
    on_one = ranks.record_of({shape: {"4": case(scale)}}, True)
    assert {row["met"] for row in on_one["aims"]} == {None} and "say nothing" in ranks.page(on_one)
