"""Write what bisect found as JSON and as text.

Measurements and faults in; a document, a short answer and a table by layer out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lockstep.verify.bisect.faults import Fault, Walked
from lockstep.verify.bisect.stages import Stage

Entry = dict[str, Any]
_REFERENCE = {"graph": "PyTorch", "engine": "its graph"}


def rows_of(walked: Walked) -> list[Entry]:
    """Return the measurements as JSON, in the order in which the stages run."""
    return [
        {
            **_place(row.stage),
            "tensor": row.tensor,
            "against": row.against,
            "max_abs_error": row.error.max_abs_error,
            "relative_error": row.error.relative_error,
            "tolerance": row.tolerance,
            "passed": row.passed,
            "position": row.position,
        }
        for row in walked.rows
    ]


def fault_of(fault: Fault) -> Entry:
    """Return a fault as JSON; its layer is the decoder layer that it lies in."""
    row = fault.measured
    return {
        "wrong": fault.wrong,
        "layer": _layer(fault),
        **{f"block_{key}" if key == "layer" else key: value for key, value in _place(fault.place).items()},
        "node": asdict(fault.node) if fault.node else None,
        "look_at": fault.look_at,
        "measured": {
            **_place(row.stage),
            "tensor": row.tensor,
            "position": row.position,
            "error_before": fault.error_before,
            "error_after": row.error.max_abs_error,
            "tolerance": row.tolerance,
        },
    }


def _place(stage: Stage) -> Entry:
    return {"part": stage.part, "graph": stage.graph, "phase": stage.phase, "layer": stage.layer}


def _layer(fault: Fault) -> int | None:
    """Return the decoder layer that a fault lies in; None for the embedding.

    What leaves it as `hidden_out` belongs to the one before.
    """
    stage = fault.place
    if (
        stage.part == "block"
        and stage.layer
        and fault.measured.stage is stage
        and fault.measured.tensor == "hidden_out"
    ):
        return stage.layer - 1
    return stage.layer


def answer(fault: Mapping[str, Any]) -> str:
    """Say in one line which is wrong, where, and the error before and after."""
    measured, node = fault["measured"], fault["node"]
    before, after = _number(measured["error_before"]), _number(measured["error_after"])
    errors = f"error {before} before, {after} after (tolerance {measured['tolerance']:g})"
    found = (
        f"{measured['tensor']} is off {_REFERENCE[fault['wrong']]} from position {measured['position']} on, {errors}"
    )
    return f"{fault['wrong']}: {where(fault)}{f', node {_name(node)}' if node else ''}: {found}"


def advice(fault: Mapping[str, Any]) -> list[str]:
    """Say how the node differs from the right one, and what to do."""
    node = fault["node"]
    if not node:
        return [fault["look_at"]]
    errors = (
        f"off by {_number(node['error_before'])} in what it reads, by {_number(node['error_after'])} in what it gives"
    )
    more = f"; {node['others']} more nodes differ by themselves" if node["others"] else ""
    return [
        f"node {_name(node)}: {node['reason'] or 'the same node as in the graph'}; {errors}{more}",
        fault["look_at"],
    ]


def _name(node: Mapping[str, Any]) -> str:
    return (
        f"{node['name']} ({node['operator']})"
        if node["name"] == node["output"]
        else f"{node['name']} ({node['operator']} -> {node['output']})"
    )


def where(fault: Mapping[str, Any]) -> str:
    part, graph, layer = fault["part"], fault["graph"], fault["block_layer"]
    if part == "embedding":
        return f"embedding (class {graph})"
    if part == "exit":
        return f"layer {layer}, exit (class {graph}, behind the last attention)"
    if part == "attention":
        return f"layer {layer}, attention ({graph}, {fault['phase']})"
    both = f"the end of layer {layer - 1} and the beginning of layer {layer}" if layer else "the beginning of layer 0"
    return f"layer {fault['layer']}, block {graph} ({both})"


def text(report: Mapping[str, Any]) -> str:
    """Write the answer, what to look at, and the table by layer."""
    lines = [report["answer"], *(f"look at: {line}" for line in report["look_at"]), "", *_table(report)]
    about = f"{report['num_tokens']} tokens, {report['num_prompt']} of them the prompt {report['prompt']!r}"
    return "\n".join([*lines, "", about, *report["notes"]]) + "\n"


def _table(report: Mapping[str, Any]) -> list[str]:
    """Write a line for each layer: the largest error of what each part gives.

    The largest error of what each part gives, of the graph against PyTorch and of the engine against its graph.
    """
    heads = (
        "layer",
        "block",
        "hidden",
        "key",
        "value",
        "attention",
        "logits",
        "engine: block",
        "attention",
        "off from position",
    )
    lines = [heads]
    for label, rows in _by_layer(report["rows"]):
        torch, engine = ([row for row in rows if row["against"] == against] for against in ("pytorch", "graph"))
        graph = next((row["graph"] for row in rows if row["part"] != "attention"), rows[0]["graph"])
        tensors = [
            _largest([row for row in torch if row["tensor"] in names])
            for names in (("hidden", "hidden_out"), ("key_out",), ("value_out",), ("attention",), ("logits",))
        ]
        parts = [
            _largest([row for row in engine if (row["part"] == "attention") == attention])
            for attention in (False, True)
        ]
        off = [row["position"] for row in rows if not row["passed"]]
        lines.append((label, graph, *tensors, *parts, str(min(off)) if off else ""))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def _by_layer(rows: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    groups: dict[str, list[Entry]] = {}
    for row in rows:
        groups.setdefault(row["part"] if row["part"] in ("embedding", "exit") else str(row["layer"]), []).append(row)
    return list(groups.items())


def _largest(rows: Sequence[Entry]) -> str:
    """Write the largest absolute error, marked where it is over tolerance."""
    if not rows:
        return "-"
    worst = max(
        rows,
        key=lambda row: (not row["passed"], float("inf") if row["max_abs_error"] is None else row["max_abs_error"]),
    )
    return _number(worst["max_abs_error"]) + ("" if worst["passed"] else " !")


def _number(error: float | None) -> str:
    return "NaN" if error is None else f"{error:.1e}" if error else "0"


def largest_within(rows: Sequence[Entry]) -> str:
    """Say where the largest error is, of rows that all pass.

    Nothing is said to be wrong, but this is the first place to look.
    """
    worst = max(rows, key=lambda row: row["relative_error"] / row["tolerance"])
    reference = {"pytorch": "of the graph against PyTorch", "graph": "of the engine against its graph"}[
        worst["against"]
    ]
    place = where({**worst, "block_layer": worst["layer"]})
    found = f"{_number(worst['max_abs_error'])} (tolerance {worst['tolerance']:g})"
    return f"the largest error {reference} is {found}, {worst['tensor']} at position {worst['position']}: {place}"
