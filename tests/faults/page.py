"""The page of planted faults, records/faults.md, from the records.

The records of `make faults`, of CPUs and of a GPU, in; Markdown out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from benchmarks.markdown import item, paragraph

from faults.case import GATES
from faults.fault import ALL
from faults.models import CHECKPOINT, MODELS
from lockstep.artifacts.files import read_json

RECORDS = ("faults.json", "faults-tensorrt.json")

_TITLE = "# Planted faults"
_HEAD = (
    "What the gates see, measured: `make faults` plants mistakes, one at a time, and sends each "
    "through every gate of its backends. Digests are made right, so that only numbers can tell. This page is made by "
    'that command (`ARGS="--write records"`); the records in `bench` have a row for each planting, with the message.',
    "A fault in a **graph** is an edit of the exported ONNX graph, with engines built from it: `validate` must "
    "see it in the graph, or `golden` in what the engines say; `compare` is asked where `golden` says nothing. The "
    "same fault in an **engine** leaves the graph right: only the engine's file holds the mistake, and `compare` and "
    "`golden` can see it. Faults in the "
    "**assembly** bind a layer to the wrong tensors or kind. Faults in the **runtime** stand in its code: cache "
    "rows, positions, page tables; `golden` alone runs it.",
    "**Harmful** is decided without the gates. Requests of many kinds within the limits (alone, in batches, to "
    "the longest length, in chunks, decoding beside prompts, in slots that were used before) go through the "
    "faulty set and through the right one along the same tokens. A fault that moves any logit by more than the "
    "target's tolerance ({tolerance}) and the right engines' own error, or makes one NaN or infinite, is harmful: "
    "its logits are certainly out of tolerance. The **score** is the share of harmful ones that some gate "
    "refuses. What is not harmful may pass.",
)


def write(folder: Path) -> Path:
    """Write faults.md into the folder of records, from the records in its `bench`."""
    records = [read_json(folder / "bench" / name) for name in RECORDS if (folder / "bench" / name).is_file()]
    path = folder / "faults.md"
    path.write_text(render(records))
    return path


def render(records: Sequence[Mapping[str, Any]]) -> str:
    tolerances: dict[str, float] = {}
    for record in records:
        tolerances |= record["tolerance"]
    tolerance = ", ".join(f"{precision} {bound:g}" for precision, bound in sorted(tolerances.items(), reverse=True))
    lines = [_TITLE, ""]
    for text in _HEAD:
        lines += [paragraph(text.format(tolerance=tolerance)), ""]
    lines += [
        "| backend | models | precision | faults | planted | harmful | caught | score |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        for group, rows in groupby(sorted(record["faults"], key=_order), _group):
            lines.append(_score(*group, list(rows)))
        lines += [_score(f"**{record['benchmark']}**", "all", "all", record["faults"])]
    lines += ["", "Models:", "", *(item(f"`{name}`: {model.about}") for name, model in MODELS.items())]
    for record in records:
        lines += ["", f"## {record['benchmark'].capitalize()}", "", paragraph(_drawn(record)), ""]
        lines += [paragraph(_codes(record)), ""]
        lines += [*_by_gate(record), "", *_table(record)]
    return "\n".join(lines) + "\n"


def _group(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return (backend, models, precision), by which rows are counted."""
    return row["backend"], CHECKPOINT if row["model"] == CHECKPOINT else "others", row["precision"]


def _order(row: Mapping[str, Any]) -> tuple[str, str, int]:
    backend, models, precision = _group(row)
    return backend, models, ALL.index(precision)


def _score(backend: str, models: str, precision: str, rows: Sequence[Mapping[str, Any]]) -> str:
    harmful = [row for row in rows if row["harmful"]]
    caught = sum(bool(row["caught_by"]) for row in harmful)
    share = f"{100 * caught / len(harmful):.1f} %" if harmful else ""
    cells = [backend, models, precision, len({row["fault"] for row in rows}), len(rows), len(harmful), caught, share]
    return f"| {' | '.join(map(str, cells))} |"


def _drawn(record: Mapping[str, Any]) -> str:
    if record["drawn"] is None:
        return "Rows of several runs, each in a part of the precisions."
    if not record["drawn"]:
        return "Each fault is planted in all of these precisions where it makes sense."
    return (
        f"Each fault is planted in {record['drawn']} of the pairs of precision and backend where it makes sense, which "
        "its name draws, or its model's where that is not the demo; one of ten of the demo's in the checkpoint too."
    )


def _codes(record: Mapping[str, Any]) -> str:
    """Say how many rows were tried with each state of the gates' code."""
    counts = Counter(row.get("code", "not noted")[:12] for row in record["faults"])
    states = [f"{code} ({count})" for code, count in counts.most_common()]
    return f"Rows by the digest of the code that was tried: {', '.join(states)}."


def _by_gate(record: Mapping[str, Any]) -> list[str]:
    """How many of the harmful each gate caught, and how many it alone did."""
    harmful = [row for row in record["faults"] if row["harmful"]]
    caught = Counter(chain(*(row["caught_by"] for row in harmful)))
    alone = Counter(row["caught_by"][0] for row in harmful if len(row["caught_by"]) == 1)
    lines = ["| gate | harmful caught | by this gate alone |", "|---|---:|---:|"]
    return lines + [f"| {gate} | {caught[gate]} | {alone[gate]} |" for gate in GATES if caught[gate]]


def _table(record: Mapping[str, Any]) -> list[str]:
    """A line for each fault, of all its plantings."""
    lines = [
        "| fault | what is wrong | model | in | planted | harmful | largest logit difference | caught by |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for name in dict.fromkeys(row["fault"] for row in record["faults"]):
        rows = [row for row in record["faults"] if row["fault"] == name]
        places = ", ".join(dict.fromkeys(row["where"] for row in rows))
        gates = set().union(*(row["caught_by"] for row in rows))
        caught = ", ".join(gate for gate in GATES if gate in gates)
        cells = [name, rows[0]["about"], rows[0]["model"], places, str(len(rows))]
        cells += [str(sum(row["harmful"] for row in rows)), _difference(rows), caught or "none"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _difference(rows: Sequence[Mapping[str, Any]]) -> str:
    run = [row for row in rows if not row["refused"]]
    if not run:
        return "not built"
    results = [row["largest_logit_difference"] for row in run]
    return "not finite" if None in results else f"{max(results):.2g}"
