"""All targets in one place: their manifests in; summary.json, summary.csv, a table for the report and one for the terminal out."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep import formats
from lockstep.files import read_json, write_bytes, write_json
from lockstep.paths import Results, Target

# Key of a row, heading, and how a value is shown.
COLUMNS = (
    ("model", "model", str),
    ("layers", "layers", str),
    ("precision", "precision", str),
    ("backend", "backend", str),
    ("engine_digest", "engine", lambda digest: digest[:12]),
    ("golden", "golden", str),
    ("reproduced", "reproduced", str),
    ("max_logit_error", "largest logit error", "{:.1e}".format),
    ("prefill_tokens_per_s", "prefill tokens/s", "{:.0f}".format),
    ("decode_tokens_per_s", "decode tokens/s", "{:.0f}".format),
)
_WIDTH = 240  # more than any row needs: rich would cut words to the terminal's width
_NUMBERS = ("max_logit_error", "prefill_tokens_per_s", "decode_tokens_per_s")


def write(results: Results, targets: Sequence[Target]) -> dict[str, Any]:
    """Collect the checks of `targets`, write summary.json, summary.csv and report/targets.html, and give the summary.

    Raises InputError when a result is absent.
    """
    summary = collect(results, targets)
    write_json(results.summary(), summary)
    write_bytes(results.summary().with_suffix(".csv"), _csv(summary["targets"]).encode())
    write_bytes(results.report("targets.html"), _html(summary["targets"]).encode())
    return summary


def collect(results: Results, targets: Sequence[Target]) -> dict[str, Any]:
    """{"format", "targets": a row of COLUMNS' keys and more for each target, in their order}."""
    return {"format": formats.SUMMARY, "targets": [_row(results, target) for target in targets]}


def print_table(summary: dict[str, Any]) -> None:
    """Print the rows as a table, nothing cut: on a narrow terminal its lines wrap."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for key, heading, _ in COLUMNS:
        table.add_column(heading, justify="right" if key in _NUMBERS else "left", no_wrap=True)
    for row in summary["targets"]:
        table.add_row(*_shown(row), style=None if row["golden"] == "pass" else "red")
    Console(width=_WIDTH).print(table)


def _row(results: Results, target: Target) -> dict[str, Any]:
    names = (target.model, target.precision, target.layers, target.backend)
    golden = read_json(results.golden(*names), formats.GOLDEN)
    speed = read_json(results.speed(*names))
    validation = read_json(results.validation(*names[:3]), formats.VALIDATION)
    engines = read_json(results.engines(target.model, target.precision, target.backend), formats.ENGINES)
    return {
        "model": target.model,
        "layers": target.layers,
        "precision": target.precision,
        "backend": target.backend,
        "backend_version": engines["backend_version"],
        "device": engines["device"].get("name") or engines["device"]["architecture"],
        "engine_digest": golden["engine_digest"],
        "engine_error": _engine_error(results.comparison(target.model, target.precision, target.backend), golden["engine_digest"]),
        "reproduced": _reproduced(results.reproduction(*names), golden["engine_digest"]),
        "validation": validation["result"],
        "golden": golden["result"],
        "max_logit_error": golden["max_logit_error"],
        "logit_tolerance": golden["tolerance"],
        "tokens_differing": sum(len(prompt["differences"]) for prompt in golden["prompts"]),
        "prefill_tokens_per_s": speed["prefill_tokens_per_s"],
        "decode_tokens_per_s": speed["decode_tokens_per_s"],
    }


def _engine_error(path: Path, engine_digest: str) -> float | None:
    """The largest relative error of these very engines against ONNX Runtime; None where they were not compared."""
    report = read_json(path, formats.COMPARISON) if path.is_file() else {}
    return report["relative_error"] if report.get("engine_digest") == engine_digest else None


def _reproduced(path: Path, engine_digest: str) -> str:
    """The level of sameness that `lockstep reproduce` found for these very engines; "-" where it has not looked at them."""
    record = read_json(path, formats.REPRODUCTION) if path.is_file() else {}
    return record["level"] if record.get("engine_digest") == engine_digest else "-"


def _shown(row: dict[str, Any]) -> list[str]:
    return [show(row[key]) for key, _, show in COLUMNS]


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Targets</title>
<style>
  table {{ border-collapse: collapse; font: 14px sans-serif; }}
  th, td {{ padding: 4px 12px; text-align: left; border-bottom: 1px solid #ddd; }}
  .number {{ text-align: right; font-variant-numeric: tabular-nums; }}
  .fail {{ color: #b00020; }}
</style>
<table>
{rows}
</table>
</html>
"""


def _html(rows: Sequence[dict[str, Any]]) -> str:
    def line(tag: str, cells: Sequence[str], result: str = "pass") -> str:
        classes = ["number" if key in _NUMBERS else "text" for key, _, _ in COLUMNS]
        inside = "".join(f'<{tag} class="{name}">{html.escape(cell)}</{tag}>' for name, cell in zip(classes, cells))
        return f'<tr class="{html.escape(result)}">{inside}</tr>'

    head = line("th", [heading for _, heading, _ in COLUMNS])
    return _PAGE.format(rows="\n".join([head, *(line("td", _shown(row), row["golden"]) for row in rows)]))
