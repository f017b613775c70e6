"""All targets in one place: their manifests in; summary.json, summary.csv, the report's pages and a table for the
terminal out."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import read_json, write_bytes, write_json
from lockstep.artifacts.manifest_files import failed_path, manifest_entries
from lockstep.errors import InputError
from lockstep.report import pages
from lockstep.report.details import Checked, Details, details
from lockstep.report.verdict import FAIL, NOT_RUN, PASS, sentence, target_of, verdict
from lockstep.targets import Results, Target

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


def outputs(results: Results, targets: Sequence[Target]) -> list[Path]:
    """The files that `write` writes, the summary first."""
    made = results.summary()
    return [made, made.with_suffix(".csv"), results.report_page(), *map(results.target_page, targets)]


def write(
    results: Results,
    targets: Sequence[Target],
    since_lock: Mapping[str, Sequence[str]] | None = None,
    not_run: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Collect the checks of `targets`, write summary.json, summary.csv and the report's pages, and give the summary.

    since_lock: what differs from the lock, a line each, by model; models without a lock are left out. not_run: why
    engines do not run here, by backend; None: as in the summary that is there.
    """
    not_run = known_not_run(results) if not_run is None else not_run
    found = {target: details(results, target, not_run.get(target.backend)) for target in targets}
    rows = _rows(results, found)
    summary = {"format": formats.SUMMARY, "targets": rows, "not_run": dict(not_run)}
    write_json(results.summary(), summary)
    write_bytes(results.summary().with_suffix(".csv"), _csv(rows).encode())
    for path in sorted(results.report_page().parent.glob("*.html")):
        if path not in outputs(results, targets):
            path.unlink()  # of a target that is none any more
    changed = dict(since_lock or {})
    write_bytes(results.report_page(), pages.index(results, rows, changed))
    for target, row in zip(targets, rows):
        page = pages.target(results, target, rows, row, found[target], changed.get(target.model))
        write_bytes(results.target_page(target), page)
    return summary


def known_not_run(results: Results) -> Mapping[str, str]:
    """Why engines do not run here, by backend, as the summary that is there says."""
    try:
        found = read_json(results.summary(), formats.SUMMARY).get("not_run", {})
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}


def collect(results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None = None) -> dict[str, Any]:
    """{"format", "targets": a row of COLUMNS' keys and more for each target, in their order}. Raises InputError for a
    manifest with entries of another type. not_run: as for `write`."""
    not_run = known_not_run(results) if not_run is None else not_run
    found = {target: details(results, target, not_run.get(target.backend)) for target in targets}
    return {"format": formats.SUMMARY, "targets": _rows(results, found), "not_run": dict(not_run)}


def _rows(results: Results, found: Mapping[Target, Details]) -> list[dict[str, Any]]:
    rows = []
    for target, known in found.items():
        with manifest_entries(results.golden(target.model, target.precision, target.layers, target.backend)):
            rows.append(_row(target, known))
    return rows


def targets_of(results: Results) -> list[Target]:
    """The targets of the summary that is there. Raises InputError for a damaged one."""
    summary = read_json(results.summary(), formats.SUMMARY)
    with manifest_entries(results.summary()):
        return [target_of(row) for row in summary["targets"]]


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
    """Print the rows as a table, nothing cut, and the verdict: on a narrow terminal its lines wrap. In colour on a
    terminal, unless NO_COLOR is set."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for key, heading, _ in COLUMNS:
        table.add_column(heading, justify="right" if key in _NUMBERS else "left", no_wrap=True)
    for row in summary["targets"]:
        table.add_row(*_shown(row), style=_STYLES[row["verdict"]] if row["verdict"] != PASS else None)
    console = Console(width=_WIDTH, soft_wrap=True)
    console.print(table)
    for row in summary["targets"]:
        if row["reason"]:
            style = _STYLES[row["verdict"]]
            console.print(f"{target_of(row)}: {row['reason']}", style=style, markup=False, highlight=False)


def print_verdict(summary: dict[str, Any]) -> None:
    """Print the verdict on all targets, one sentence."""
    from rich.console import Console

    style = _STYLES[verdict(row["verdict"] for row in summary["targets"])]
    Console(soft_wrap=True).print(sentence(summary["targets"]), style=f"bold {style}", markup=False, highlight=False)


_STYLES = {PASS: "green", FAIL: "red", NOT_RUN: "yellow"}


def _row(target: Target, found: Details) -> dict[str, Any]:
    checks, built, speed, golden = found.checks(), found.engines, found.speed, found.golden.report
    comparison = found.compare.report if found.compare else None
    digest = golden.engine_digest if golden else built.digest if built else None
    device = built.device if built else {}
    return {
        "model": target.model,
        "layers": target.layers,
        "precision": target.precision,
        "backend": target.backend,
        "verdict": verdict(check.result for check in checks.values()),
        "backend_version": built.backend_version if built else None,
        "device": device.get("name") or device.get("architecture"),
        "engine_digest": digest,
        "engine_error": comparison.relative_error if comparison and comparison.engine_digest == digest else None,
        "reproduced": found.reproduction["level"] if found.reproduction else "-",
        "validation": found.validate.result,
        "golden": found.golden.result,
        "reason": "; ".join(_reason(name, check) for name, check in checks.items() if check.result != PASS) or None,
        "max_logit_error": golden.max_logit_error if golden else None,
        "logit_tolerance": golden.tolerance if golden else None,
        "tokens_differing": sum(len(prompt.differences) for prompt in golden.prompts) if golden else None,
        "prefill_tokens_per_s": speed.prefill_tokens_per_s if speed else None,
        "decode_tokens_per_s": speed.decode_tokens_per_s if speed else None,
    }


def _reason(name: str, check: Checked) -> str:
    return f"{name}{f' {NOT_RUN}' * (check.result == NOT_RUN)}: {check.reason}"


_VERDICTS = ("engine_digest", "validation", "golden", "reason")


def _shown(row: dict[str, Any]) -> list[str]:
    return ["-" if row[key] is None else show(row[key]) for key, _, show in COLUMNS]


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
