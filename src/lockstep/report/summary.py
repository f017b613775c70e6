"""All targets in one place: their manifests in; summary.json, summary.csv, a table for the report and one for the
terminal out.

A check has passed where its report is there, has its record, and is of what lies there now; it has failed where the
report of a failure is there, which the next pass removes. Else it is "not run".
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import read_json, write_bytes, write_json
from lockstep.artifacts.manifest_files import content, failed_path, manifest_entries, record_path
from lockstep.errors import InputError
from lockstep.targets import Results, Target

PASS, FAIL, NOT_RUN = "pass", "fail", "not run"

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
    """Collect the checks of `targets`, write summary.json, summary.csv and report/targets.html, and give the
    summary."""
    summary = collect(results, targets)
    write_json(results.summary(), summary)
    write_bytes(results.summary().with_suffix(".csv"), _csv(summary["targets"]).encode())
    write_bytes(results.report("targets.html"), _html(summary["targets"]).encode())
    return summary


def collect(results: Results, targets: Sequence[Target]) -> dict[str, Any]:
    """{"format", "targets": a row of COLUMNS' keys and more for each target, in their order}. Raises InputError for a
    manifest with entries of another type."""
    rows = []
    for target in targets:
        with manifest_entries(results.golden(target.model, target.precision, target.layers, target.backend)):
            rows.append(_row(results, target))
    return {"format": formats.SUMMARY, "targets": rows}


def targets_of(results: Results) -> list[Target]:
    """The targets of the summary that is there. Raises InputError for a damaged one."""
    summary = read_json(results.summary(), formats.SUMMARY)
    with manifest_entries(results.summary()):
        return [Target(row["model"], row["precision"], row["layers"], row["backend"]) for row in summary["targets"]]


def is_stale(results: Results) -> bool:
    """Whether a summary is there whose verdicts are not those of the checks that are there now. One that is damaged is
    not: who reads it refuses it."""
    try:
        now = collect(results, targets_of(results))["targets"]
        rows = read_json(results.summary())["targets"]
    except InputError:
        return False
    return [[row.get(key) for key in _VERDICTS] for row in rows] != [[row[key] for key in _VERDICTS] for row in now]


def sources(results: Results, target: Target) -> list[Path]:
    """All that a row may be made of, there or not."""
    names = (target.model, target.precision, target.layers, target.backend)
    engines, comparison = (
        path(target.model, target.precision, target.backend) for path in (results.engines, results.comparison)
    )
    checks = [results.validation(*names[:3]), comparison, results.golden(*names)]
    return [engines, *checks, *map(failed_path, checks), results.speed(*names), results.reproduction(*names)]


def print_table(summary: dict[str, Any]) -> None:
    """Print the rows as a table, nothing cut: on a narrow terminal its lines wrap."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for key, heading, _ in COLUMNS:
        table.add_column(heading, justify="right" if key in _NUMBERS else "left", no_wrap=True)
    for row in summary["targets"]:
        table.add_row(*_shown(row), style="red" if row["reason"] else None)
    console = Console(width=_WIDTH, soft_wrap=True)
    console.print(table)
    for target, reason in _reasons(summary["targets"]):
        console.print(f"{target}: {reason}", style="red", markup=False, highlight=False)


@dataclass(frozen=True)
class _Checked:
    """What is known of a check: PASS with its report, or FAIL or NOT_RUN with the reason."""

    result: str
    reason: str | None = None
    report: Mapping[str, Any] = field(default_factory=dict)


def _checked(out: Path, format: str, inputs: Mapping[str, Path]) -> _Checked:
    """inputs: what the check reads, by the names of its record."""
    failed = failed_path(out)
    try:
        if failed.is_file():
            report = read_json(failed)
            return _Checked(
                FAIL, str(report.get("failure") or f"see {failed}"), report if report["format"] == format else {}
            )
        if not out.is_file():
            return _Checked(NOT_RUN, f"{out} is not there")
        if not record_path(out).is_file():
            return _Checked(NOT_RUN, f"no record says how {out} was made")
        report, of = read_json(out, format), read_json(record_path(out), formats.BUILD)["inputs"]
        for name, path in inputs.items():
            if name in of and (not path.is_file() or content(path) != of[name]):
                return _Checked(NOT_RUN, f"{path} is another since")
        return _Checked(report["result"], None, report)
    except (InputError, LookupError, TypeError, AttributeError) as error:
        return _Checked(
            NOT_RUN,
            " ".join(str(error).split())
            if isinstance(error, InputError)
            else f"{out}: expected a report with its record, found other entries",
        )


def _row(results: Results, target: Target) -> dict[str, Any]:
    names = (target.model, target.precision, target.layers, target.backend)
    model, precision, layers, backend = names
    graphs = {"assembly": results.assembly(model, precision), "weights": results.weights(model, precision)}
    engines = {"engines": results.engines(model, precision, backend)}
    validation = _checked(
        results.validation(model, precision, layers),
        formats.VALIDATION,
        {**graphs, "checkpoint": results.checkpoint(model)},
    )
    golden = _checked(
        results.golden(*names), formats.GOLDEN, {**graphs, **engines, "reference": results.reference(model, layers)}
    )
    comparison = _checked(results.comparison(model, precision, backend), formats.COMPARISON, {**graphs, **engines})
    checks = {"validate": validation, "golden": golden}
    if comparison.result != NOT_RUN:  # only some backends are compared, and not always
        checks["compare"] = comparison
    built, digest = _entries(engines["engines"]), golden.report.get("engine_digest")
    device, speed = built.get("device", {}), _entries(results.speed(*names)) if golden.result == PASS else {}
    return {
        "model": model,
        "layers": layers,
        "precision": precision,
        "backend": backend,
        "backend_version": built.get("backend_version"),
        "device": device.get("name") or device.get("architecture"),
        "engine_digest": digest,
        "engine_error": comparison.report.get("relative_error")
        if digest and comparison.report.get("engine_digest") == digest
        else None,
        "reproduced": _reproduced(results.reproduction(*names), digest),
        "validation": validation.result,
        "golden": golden.result,
        "reason": "; ".join(f"{name}: {check.reason}" for name, check in checks.items() if check.result != PASS)
        or None,
        "max_logit_error": golden.report.get("max_logit_error"),
        "logit_tolerance": golden.report.get("tolerance"),
        "tokens_differing": sum(len(prompt["differences"]) for prompt in golden.report["prompts"])
        if golden.report
        else None,
        "prefill_tokens_per_s": speed.get("prefill_tokens_per_s"),
        "decode_tokens_per_s": speed.get("decode_tokens_per_s"),
    }


_VERDICTS = ("engine_digest", "validation", "golden", "reason")


def _entries(path: Path) -> Mapping[str, Any]:
    """A manifest; nothing where there is none that can be read, which the checks that read it say."""
    try:
        value = read_json(path)
    except InputError:
        return {}
    return value if isinstance(value, dict) else {}


def _reproduced(path: Path, engine_digest: str | None) -> str:
    """The level of sameness that `lockstep reproduce` found for these very engines; "-" where it has not looked at
    them."""
    record = _entries(path)
    return record["level"] if engine_digest and record.get("engine_digest") == engine_digest else "-"


def _reasons(rows: Sequence[dict[str, Any]]) -> list[tuple[Target, str]]:
    return [
        (Target(row["model"], row["precision"], row["layers"], row["backend"]), row["reason"])
        for row in rows
        if row["reason"]
    ]


def _shown(row: dict[str, Any]) -> list[str]:
    return ["-" if row[key] is None else show(row[key]) for key, _, show in COLUMNS]


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
{reasons}
</html>
"""


def _html(rows: Sequence[dict[str, Any]]) -> str:
    def line(tag: str, cells: Sequence[str], result: str = "pass") -> str:
        classes = ["number" if key in _NUMBERS else "text" for key, _, _ in COLUMNS]
        inside = "".join(f'<{tag} class="{name}">{html.escape(cell)}</{tag}>' for name, cell in zip(classes, cells))
        return f'<tr class="{html.escape(result)}">{inside}</tr>'

    head = line("th", [heading for _, heading, _ in COLUMNS])
    reasons = [f'<p class="fail">{html.escape(f"{target}: {reason}")}</p>' for target, reason in _reasons(rows)]
    body = [line("td", _shown(row), FAIL if row["reason"] else PASS) for row in rows]
    return _PAGE.format(rows="\n".join([head, *body]), reasons="\n".join(reasons))
