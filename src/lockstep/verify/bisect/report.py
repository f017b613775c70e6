"""Write what bisect found as JSON and as text.

Measurements and faults in; a document, a short answer and a table by layer out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.artifacts.bisect_report import BisectReport, FoundFault, MeasuredOutput, StageName
from lockstep.verify.metrics import or_infinity

# PyTorch's five tensors, then the engine's two parts.
_HEADS = ("layer", "block", "hidden", "key", "value", "attention", "logits", "engine: block", "attention")
_TENSORS = (("hidden", "hidden_out"), ("key_out",), ("value_out",), ("attention",), ("logits",))
_REFERENCE = {"graph": "PyTorch", "engine": "its graph"}
_ERRORS = {"pytorch": "of the graph against PyTorch", "graph": "of the engine against its graph"}


def answer(fault: FoundFault) -> str:
    """Return a sentence: the faulty graph or engine, its layer, and the error before and after."""
    row = fault.measured
    before = _number(fault.error_before)
    after = _number(row.max_abs_error)
    errors = f"error {before} before, {after} after (tolerance {row.tolerance:g})"
    off = f"{row.tensor} is off {_REFERENCE[fault.wrong]} from position {row.position} on, {errors}"
    place = _where(fault, fault.decoder_layer)
    # PyTorch's attention is compared after the block: its query, key and value are not visible in between.
    if (fault.wrong, fault.phase) == ("graph", "prefill"):
        place += " or the block before it"
    return f"{fault.wrong}: {place}: {off}"


def verdict(
    faults: Sequence[FoundFault], rows: Sequence[MeasuredOutput], overflow: str, weights: Path
) -> tuple[str, list[str]]:
    """Return the answer, which begins with the kind of fault, and advice. weights: the target's manifest."""
    if faults:
        return answer(faults[0]), [faults[0].look_at, *(f"next, {answer(fault)}" for fault in faults[1:])]
    if overflow:
        what, _, remedy = overflow.partition("; ")
        return f"overflow: {what}", [remedy]
    off = {row.part: _off(row) for row in rows if not row.passed}
    within = _largest_within(rows)
    if "weights" in off:
        line = f"weights: PyTorch on {weights} is off the reference {off['weights']}"
        return line, [f"{weights}: delete it and convert again"]
    if "runtime" in off:
        right = "each graph and each engine alone is right, but the logits of lockstep.runtime are off"
        advice = "how steps are packed and cache rows are kept (lockstep.runtime), or errors that accumulate"
        return f"runtime: {right} {off['runtime']}", [advice, within]
    advice = "another prompt (--prompt), or what this request cannot show: other requests in its batch"
    return f"nothing: no graph and no engine is off on these tokens; {within}", [advice]


def _off(row: MeasuredOutput) -> str:
    error = "NaN or infinity"
    if row.max_abs_error is not None:
        error = f"{row.max_abs_error:.1e}"
    return f"from position {row.position} on, largest error {error} (tolerance {row.tolerance:g})"


def _where(stage: StageName, decoder_layer: int | None) -> str:
    layer = stage.layer
    graph = stage.graph
    if stage.part == "embedding":
        return f"embedding (class {graph})"
    if stage.part == "exit":
        return f"layer {layer}, exit (class {graph}, after the last attention)"
    if stage.part == "attention":
        return f"layer {layer}, attention ({graph}, {stage.phase})"
    boundary = "the beginning of layer 0"
    if layer:
        boundary = f"the end of layer {layer - 1} and the beginning of layer {layer}"
    return f"layer {decoder_layer}, block {graph} ({boundary})"


def text(report: BisectReport) -> str:
    lines = [report.answer, *(f"look at: {line}" for line in report.look_at), "", *_table(report)]
    about = f"{report.num_tokens} tokens, {report.num_prompt} of them the prompt {report.prompt!r}"
    return "\n".join([*lines, "", about, *report.notes]) + "\n"


def _table(report: BisectReport) -> list[str]:
    """Write a line for each layer: the largest error of each part, of graphs and of engines."""
    lines: list[tuple[str, ...]] = [(*_HEADS, "off from position")]
    for label, rows in _by_layer(report.rows):
        torch = [row for row in rows if row.against == "pytorch"]
        engine = [row for row in rows if row.against == "graph"]
        graph = next((row.graph for row in rows if row.part != "attention"), rows[0].graph)
        tensors = [_largest([row for row in torch if row.tensor in names]) for names in _TENSORS]
        block = _largest([row for row in engine if row.part != "attention"])
        attention = _largest([row for row in engine if row.part == "attention"])
        position = min((row.position for row in rows if not row.passed), default="")
        lines.append((label, graph, *tensors, block, attention, str(position)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    aligned = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        aligned.append("  ".join(cells).rstrip())
    return aligned


def _by_layer(rows: Sequence[MeasuredOutput]) -> list[tuple[str, list[MeasuredOutput]]]:
    groups: dict[str, list[MeasuredOutput]] = {}
    for row in rows:
        label = row.part
        if row.part in ("block", "attention"):
            label = str(row.layer)
        groups.setdefault(label, []).append(row)
    return list(groups.items())


def _largest(rows: Sequence[MeasuredOutput]) -> str:
    if not rows:
        return "-"
    worst = max(rows, key=lambda row: (not row.passed, or_infinity(row.max_abs_error)))
    if worst.passed:
        return _number(worst.max_abs_error)
    return f"{_number(worst.max_abs_error)} !"


def _number(error: float | None) -> str:
    if error is None:
        return "NaN"
    if error == 0:
        return "0"
    return f"{error:.1e}"


def _largest_within(rows: Sequence[MeasuredOutput]) -> str:
    """Return in words the largest error of a stage, of rows that all pass: the first place to look."""
    stages = [row for row in rows if row.against in _ERRORS and row.graph]
    worst = max(stages, key=lambda row: (row.relative_error or 0.0) / row.tolerance)
    error = f"{_number(worst.max_abs_error)} (tolerance {worst.tolerance:g})"
    place = f"{worst.tensor} at position {worst.position}: {_where(worst, worst.layer)}"
    return f"the largest error {_ERRORS[worst.against]} is {error}, {place}"
