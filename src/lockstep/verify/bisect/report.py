"""Write what bisect found as JSON and as text.

Measurements and faults in; a document, a short answer and a table by layer out.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.artifacts.bisect_report import BisectReport, FaultNode, FoundFault, MeasuredOutput

_HEADS = tuple("layer|block|hidden|key|value|attention|logits|engine: block|attention|off from position".split("|"))
_REFERENCE = {"graph": "PyTorch", "engine": "its graph"}


def answer(fault: FoundFault) -> str:
    """Say in one line which is wrong, where, and the error before and after."""
    measured, node = fault.measured, fault.node
    before, after = _number(measured.error_before), _number(measured.error_after)
    errors = f"error {before} before, {after} after (tolerance {measured.tolerance:g})"
    off = f"{measured.tensor} is off {_REFERENCE[fault.wrong]} from position {measured.position} on, {errors}"
    place = _where(fault.part, fault.graph, fault.phase, fault.block_layer, fault.layer)
    return f"{fault.wrong}: {place}{f', node {_name(node)}' if node else ''}: {off}"


def advice(fault: FoundFault) -> list[str]:
    """Say how the node differs from the right one, and what to do."""
    node = fault.node
    if not node:
        return [fault.look_at]
    before, after = ("inf" if error is None else _number(error) for error in (node.error_before, node.error_after))
    more = f"; {node.others} more nodes differ by themselves" if node.others else ""
    reason = node.reason or "the same node as in the graph"
    return [
        f"node {_name(node)}: {reason}; off by {before} in what it reads, by {after} in what it gives{more}",
        fault.look_at,
    ]


def _name(node: FaultNode) -> str:
    operator = f"{node.operator} -> {node.output}" if node.name != node.output else node.operator
    return f"{node.name} ({operator})"


def _where(part: str, graph: str, phase: str, block_layer: int | None, layer: int | None) -> str:
    """Say where a stage is. block_layer: its own; layer: the decoder layer that its fault lies in."""
    if part == "embedding":
        return f"embedding (class {graph})"
    if part == "exit":
        return f"layer {block_layer}, exit (class {graph}, behind the last attention)"
    if part == "attention":
        return f"layer {block_layer}, attention ({graph}, {phase})"
    both = (
        f"the end of layer {block_layer - 1} and the beginning of layer {block_layer}"
        if block_layer
        else "the beginning of layer 0"
    )
    return f"layer {layer}, block {graph} ({both})"


def text(report: BisectReport) -> str:
    lines = [report.answer, *(f"look at: {line}" for line in report.look_at), "", *_table(report)]
    about = f"{report.num_tokens} tokens, {report.num_prompt} of them the prompt {report.prompt!r}"
    return "\n".join([*lines, "", about, *report.notes]) + "\n"


def _table(report: BisectReport) -> list[str]:
    """Write a line for each layer: the largest error of each part, of graphs and of engines."""
    lines: list[tuple[str, ...]] = [_HEADS]
    for label, rows in _by_layer(report.rows):
        torch, engine = ([row for row in rows if row.against == against] for against in ("pytorch", "graph"))
        graph = next((row.graph for row in rows if row.part != "attention"), rows[0].graph)
        tensors = [
            _largest([row for row in torch if row.tensor in names])
            for names in (("hidden", "hidden_out"), ("key_out",), ("value_out",), ("attention",), ("logits",))
        ]
        parts = [
            _largest([row for row in engine if (row.part == "attention") == attention]) for attention in (False, True)
        ]
        off = [row.position for row in rows if not row.passed]
        lines.append((label, graph, *tensors, *parts, str(min(off)) if off else ""))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def _by_layer(rows: Sequence[MeasuredOutput]) -> list[tuple[str, list[MeasuredOutput]]]:
    groups: dict[str, list[MeasuredOutput]] = {}
    for row in rows:
        groups.setdefault(row.part if row.part in ("embedding", "exit") else str(row.layer), []).append(row)
    return list(groups.items())


def _largest(rows: Sequence[MeasuredOutput]) -> str:
    if not rows:
        return "-"
    worst = max(
        rows, key=lambda row: (not row.passed, float("inf") if row.max_abs_error is None else row.max_abs_error)
    )
    return _number(worst.max_abs_error) + ("" if worst.passed else " !")


def _number(error: float | None) -> str:
    if error is None:
        return "NaN"
    return f"{error:.1e}" if error else "0"


def largest_within(rows: Sequence[MeasuredOutput]) -> str:
    """Say where the largest error is, of rows that all pass: the first place to look."""
    worst = max(rows, key=lambda row: (row.relative_error or 0.0) / row.tolerance)
    reference = {"pytorch": "of the graph against PyTorch", "graph": "of the engine against its graph"}[worst.against]
    place = _where(*worst.stage, worst.layer)
    error = f"{_number(worst.max_abs_error)} (tolerance {worst.tolerance:g})"
    return f"the largest error {reference} is {error}, {worst.tensor} at position {worst.position}: {place}"
