"""The summary of all targets.

Their manifests in; summary.json, summary.csv, the report's pages and a table for the terminal out.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import write_bytes
from lockstep.artifacts.summary import Summary, SummaryRow
from lockstep.manifests.manifest_files import content
from lockstep.report import pages
from lockstep.report.checks import CHECKS, COLUMNS, FIGURES, RESULTS, Checked, Column, loaded
from lockstep.report.details import Details, details
from lockstep.report.since_lock import Changes
from lockstep.report.verdict import FAIL, NOT_RUN, PASS, headline, overall, reasons, verdict, why_not_here
from lockstep.targets import Results, Target

_WIDTH = 100  # of the table
_ANY = 10_000  # more than any row needs: rich would cut words


def outputs(results: Results, targets: Sequence[Target]) -> list[Path]:
    made = results.summary()
    return [made, made.with_suffix(".csv"), results.report_page(), *map(results.target_page, targets)]


def write(
    results: Results,
    targets: Sequence[Target],
    since_lock: Mapping[str, Changes] | None = None,
    not_run: Mapping[str, str] | None = None,
) -> Summary:
    """Collect the checks of `targets`; write the summary and the report's pages.

    The files are summary.json, summary.csv and the pages; returns the summary. since_lock: what differs from the lock,
    by model; models without a lock are left out. not_run: why engines do not run here, as `Config.not_run` gives it;
    None: as in the summary that is there.
    """
    found, summary = _collected(results, targets, not_run)
    rows = summary.targets
    summary.save(results.summary())
    write_bytes(results.summary().with_suffix(".csv"), _csv(rows).encode())
    there = {
        path for folder in (results.target_pages(), results.report_page().parent) for path in folder.glob("*.html")
    }
    for path in there - {results.report_page(), *map(results.target_page, targets)}:
        path.unlink()  # of a target that is none any more
    write_bytes(results.report_page(), pages.index(results, summary, since_lock or {}))
    for target, row in zip(targets, rows):
        write_bytes(results.target_page(target), pages.target(results, target, row, found[target]))
    return summary


def collect(results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None = None) -> Summary:
    """Return the summary as `write` would write it, a row for each target.

    In the order of `targets`. not_run: as for `write`.
    """
    return _collected(results, targets, not_run)[1]


def _collected(
    results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None
) -> tuple[dict[Target, Details], Summary]:
    if not_run is None:
        known = loaded(Summary.load, results.summary())
        not_run = known.not_run if known else {}
    remembered = functools.cache(content)
    found = {}
    for target in targets:
        cannot_run = not_run.get(f"{target.precision}/{target.backend}") or not_run.get(target.backend)
        found[target] = details(results, target, cannot_run, remembered)
    return found, Summary(tuple(_row(target, known) for target, known in found.items()), not_run)


def print_table(summary: Summary) -> None:
    """Print the targets that can run here as a table of at most 100 columns, and below it why others do not pass.

    Columns that do not fit are in the report only; no value is cut. On a narrower terminal its lines wrap. In colour on
    a terminal, unless NO_COLOR is set.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=_ANY, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = [row for row in summary.targets if not why_not_here(summary, row)]
    columns = _that_fit([(column, _cells(column, rows)) for column in COLUMNS]) if rows else []
    for column, _ in columns:
        table.add_column(
            "\n".join(column.heading.rsplit(" ", 1)),
            justify="right" if column.is_number else "left",
            no_wrap=True,
            vertical="bottom",
        )
    for number, row in enumerate(rows):
        table.add_row(
            *(cells[number] for _, cells in columns), style=_STYLES[row.verdict] if row.verdict != PASS else None
        )
    if rows:
        console.print(table)
    for result, targets, reason in reasons(summary.targets):
        console.print(f"{targets}: {reason}", style=_STYLES[result], markup=False, highlight=False)


def _cells(column: Column, rows: Sequence[SummaryRow]) -> list[str]:
    return [column.of(row) for row in rows]


def _that_fit(columns: Sequence[tuple[Column, list[str]]]) -> list[tuple[Column, list[str]]]:
    """Return the columns with a value, less those of the highest ranks until they fit in the table's width."""
    kept = [(column, cells) for column, cells in columns if set(cells) != {"-"}]
    while sum(2 + max(map(len, [*column.heading.rsplit(" ", 1), *cells])) for column, cells in kept) > _WIDTH + 2:
        last = max(kept, key=lambda each: each[0].rank)
        if not last[0].rank:
            break
        kept.remove(last)
    return kept


def print_verdict(summary: Summary) -> None:
    from rich.console import Console

    style = f"bold {_STYLES[overall(summary)]}"
    Console(soft_wrap=True).print(headline(summary), style=style, markup=False, highlight=False)


_STYLES = {PASS: "green", FAIL: "red", NOT_RUN: "yellow"}


def _row(target: Target, found: Details) -> SummaryRow:
    checks = found.checks
    built = found.engines
    speed = found.speed
    drift = found.drift
    device = built.device if built else {}
    return SummaryRow(
        model=target.model,
        layers=target.layers,
        precision=target.precision,
        backend=target.backend,
        verdict=verdict(check.result for check in checks.values()),
        backend_version=built.backend_version if built else None,
        device=device.get("name") or device.get("architecture"),
        engine_digest=found.digest,
        reproduced=found.reproduction.in_words if found.reproduction else "-",
        reason="; ".join(_reason(name, check) for name, check in checks.items() if check.result != PASS) or None,
        prefill_tokens_per_s=speed.prefill_tokens_per_s if speed else None,
        decode_tokens_per_s=speed.decode_tokens_per_s if speed else None,
        drift=drift.words() if drift else None,
        drift_logit_error=drift.rms_logit_error if drift else None,
        drift_tokens_differing=drift.tokens_differing if drift else None,
        drift_perplexity=drift.perplexity / drift.full_perplexity - 1 if drift else None,
        **_of_checks(found),
    )


def _of_checks(found: Details) -> dict[str, Any]:
    """Return what the checks give to a row, by key: their results, and figures of the engines that are there."""
    values: dict[str, Any] = dict.fromkeys(column.key for column in (*RESULTS, *FIGURES))
    for check in CHECKS:
        checked = found.checks.get(check.name)
        if checked and check.result:
            values[check.result.key] = checked.result
        if checked and checked.report and check.figures and checked.report.engine_digest == found.digest:
            values |= {column.key: figure(checked.report) for column, figure in check.figures.items()}
    return values


def _reason(name: str, check: Checked) -> str:
    return f"{name}{f' {NOT_RUN}' * (check.result == NOT_RUN)}: {check.reason}"


def _csv(rows: Sequence[SummaryRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[field.name for field in fields(SummaryRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
