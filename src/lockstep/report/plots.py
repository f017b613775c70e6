"""The plots of Snakemake's report.

Validations and the summary in; SVG files out, the same bytes for the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.artifacts.files import write_bytes
from lockstep.artifacts.reports import BlockErrors, ValidationReport
from lockstep.artifacts.summary import Summary
from lockstep.report import charts


def error_by_layer(validations: Sequence[Path], out: Path) -> None:
    """Plot the largest error of each layer's tensors, on a log scale.

    Beside it stands what the precision itself costs (dashed). A line for each model and precision, of the validation
    with the most layers: the others' layers are the same.
    """
    deepest: dict[str, Sequence[BlockErrors]] = {}
    for path in validations:
        validation = ValidationReport.load(path)
        name, blocks = f"{validation.target.model}, {validation.target.precision}", validation.blocks or ()
        deepest[name] = max(blocks, deepest.get(name, blocks), key=len)
    lines = [charts.error_line(name, blocks) for name, blocks in deepest.items()]
    write_bytes(out, charts.error_by_layer(lines).encode())


def speed(summary_json: Path, out: Path) -> None:
    """Plot prefill and decode of each target in tokens per second.

    Whole models first, cut ones below.
    """
    rows = sorted(Summary.load(summary_json).targets, key=lambda row: row.layers != "all")
    write_bytes(out, charts.speeds(rows).encode())
