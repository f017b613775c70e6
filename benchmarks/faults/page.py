"""The page of planted faults, docs/faults.md, from the records.

The records of `python -m benchmarks faults`, one of each backend, in; Markdown out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.gates import GATES
from benchmarks.faults.models import MODELS
from benchmarks.markdown import item, paragraph
from lockstep.artifacts.files import read_json

RECORDS = (
    "faults.json",
    "faults-quantized.json",
    "faults-openvino-quantized.json",
    "faults-ranks.json",
    "faults-tensorrt.json",
)
_LONGEST = 160  # characters of a message

_TITLE = "# Planted faults"
_HEAD = (
    "What the gates see, measured: `python -m benchmarks faults` plants mistakes, one at a time, and sends each "
    "through every gate of a backend. Digests are made right, so that only numbers can tell. This page is made by "
    "that command (`--write docs`).",
    "A fault in a **graph** is an edit of the exported ONNX graph, with engines built from it: `validate` must "
    "see it in the graph, or `golden` in what the engines say. The same fault in an **engine** leaves the graph "
    "right: only the engine's file holds the mistake, and `compare` and `golden` can see it. Faults in the "
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
    """Write faults.md into the folder of documents, from the records in its `bench`."""
    records = [read_json(folder / "bench" / name) for name in RECORDS if (folder / "bench" / name).is_file()]
    path = folder / "faults.md"
    path.write_text(render(records))
    return path


def render(records: Sequence[Mapping[str, Any]]) -> str:
    tolerances = {precision: bound for record in records for precision, bound in record["tolerance"].items()}
    tolerance = ", ".join(f"{precision} {bound:g}" for precision, bound in sorted(tolerances.items(), reverse=True))
    lines = [_TITLE, ""]
    for text in _HEAD:
        lines += [paragraph(text.format(tolerance=tolerance)), ""]
    lines += [
        "| backend | precisions | faults | planted | harmful | caught | score |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['backend']}{_over_ranks(r)} | {', '.join(r['tolerance'])} | {r['distinct']} | {r['planted']} | "
        f"{r['harmful']} | {r['harmful_caught']} | {100 * r['score']:.1f} % |"
        for r in records
    ]
    lines += ["", "Each fault is planted in all of these precisions where it makes sense. Models:", ""]
    lines += [item(f"`{name}`: {model.about}") for name, model in MODELS.items()]
    for record in records:
        lines += [
            "",
            f"## {record['backend']} in {', '.join(record['tolerance'])}{_over_ranks(record)}",
            "",
            *_by_gate(record),
            "",
            *_table(record),
        ]
    return "\n".join(lines) + "\n"


def _over_ranks(record: Mapping[str, Any]) -> str:
    return ", over two ranks" if record["benchmark"].endswith("-ranks") else ""


def _by_gate(record: Mapping[str, Any]) -> list[str]:
    """How many of the harmful each gate caught, and how many it alone did."""
    harmful = [row for row in record["faults"] if row["harmful"]]
    caught = Counter(gate for row in harmful for gate in row["caught_by"])
    alone = Counter(row["caught_by"][0] for row in harmful if len(row["caught_by"]) == 1)
    lines = ["| gate | harmful caught | by this gate alone |", "|---|---:|---:|"]
    return lines + [f"| {gate} | {caught[gate]} | {alone[gate]} |" for gate in GATES if caught[gate]]


def _table(record: Mapping[str, Any]) -> list[str]:
    lines = [
        "| fault | what is wrong | model | in | precision | largest logit difference | harmful | caught "
        "by | message of the first |",
        "|---|---|---|---|---|---:|---|---|---|",
    ]
    for row in record["faults"]:
        cells = [
            row["fault"],
            row["about"],
            row["model"],
            row["where"],
            row["precision"],
            _difference(row),
            "yes" if row["harmful"] else "no",
        ]
        lines.append(
            "| " + " | ".join([*cells, ", ".join(row["caught_by"]) or "none", _message(row["message"])]) + " |"
        )
    return lines


def _difference(row: Mapping[str, Any]) -> str:
    if row["refused"]:
        return "not built"
    return "not finite" if row["largest_logit_difference"] is None else f"{row['largest_logit_difference']:.2g}"


def _message(text: str | None) -> str:
    short = (text or "").replace("|", "\\|")
    return short if len(short) <= _LONGEST else f"{short[: _LONGEST - 3]}..."
