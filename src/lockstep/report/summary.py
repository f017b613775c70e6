"""The summary: manifests of targets in; summary.json, summary.csv, the report and a table out."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import remove_leftovers, write_bytes
from lockstep.artifacts.summary import Summary, SummaryRow
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import content
from lockstep.report import pages
from lockstep.report.checks import CHECKS, COLUMNS, FIGURES, RESULTS, Checked, Column, loaded
from lockstep.report.details import Details, read_details
from lockstep.report.jobs import job_states
from lockstep.report.since_lock import Changes, changes_since_lock
from lockstep.report.verdict import FAIL, NOT_RUN, PASS, headline, overall, reasons, verdict, why_not_here
from lockstep.targets import Results, Target

_TABLE_WIDTH = 100
_CONSOLE_WIDTH = 10_000  # wider than any row: rich truncates what is wider than its console
_STYLES = {PASS: "green", FAIL: "red", NOT_RUN: "yellow"}


def outputs(results: Results, targets: Sequence[Target]) -> list[Path]:
    summary = results.summary()
    return [summary, summary.with_suffix(".csv"), results.report_page(), *map(results.target_page, targets)]


def write(
    results: Results,
    targets: Sequence[Target],
    since_lock: Mapping[str, Changes] | None = None,
    not_run: Mapping[str, str] | None = None,
) -> Summary:
    """Collect the checks of `targets`; write summary.json, summary.csv and the report's pages; return the summary.

    since_lock: {model: differences from its lock}; models without a lock are left out. not_run: why engines do not run
    here, as in `Config.not_run`; None: as in the existing summary.
    """
    # Targets share graphs, weights and references: hash each file once.
    cached_content = functools.cache(content)
    details_of, summary = _collect(results, targets, not_run, cached_content)
    jobs = job_states(results, targets, cached_content)
    summary.save(results.summary())
    write_bytes(results.summary().with_suffix(".csv"), _csv(summary.targets).encode())
    current_pages = {results.report_page(), *map(results.target_page, targets)}
    for folder in {results.target_pages(), results.report_page().parent}:
        for path in folder.glob("*.html"):
            # Of a target that was removed from the config.
            if path not in current_pages:
                path.unlink()
    write_bytes(results.report_page(), pages.index(results, summary, since_lock or {}, details_of, jobs))
    for target, row in zip(targets, summary.targets):
        write_bytes(results.target_page(target), pages.target(results, target, row, details_of[target], jobs))
    return summary


def summarise(results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None = None) -> Path:
    """Write the summary and its pages, with the differences from the locks here; return the summary's path."""
    changes = changes_since_lock(results, [target.model for target in targets], Path("locks"))
    write(results, targets, changes, not_run)
    return results.summary()


def refresh(results: Results) -> None:
    """Rewrite an existing summary that is out of date, and remove what a killed process left of it."""
    with contextlib.suppress(InputError):  # no summary yet, or a damaged one, which `lockstep summary` reports
        existing = Summary.load(results.summary())
        targets = [row.target for row in existing.targets]
        paths = outputs(results, targets)
        is_complete = all(path.is_file() for path in paths)
        if not is_complete or collect(results, targets, existing.not_run) != existing:
            summarise(results, targets, existing.not_run)
        for path in paths:
            remove_leftovers(path)


def collect(results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None = None) -> Summary:
    """Return the summary that `write` would write: a row for each target, in order."""
    return _collect(results, targets, not_run, functools.cache(content))[1]


def _collect(
    results: Results,
    targets: Sequence[Target],
    not_run: Mapping[str, str] | None,
    cached_content: Callable[[Path], str],
) -> tuple[dict[Target, Details], Summary]:
    if not_run is None:
        not_run = getattr(loaded(Summary.load, results.summary()), "not_run", {})
    details_of = {}
    for target in targets:
        cannot_run = not_run.get(f"{target.precision}/{target.backend}") or not_run.get(target.backend)
        details_of[target] = read_details(results, target, cannot_run, cached_content)
    rows = tuple(_row(target, details) for target, details in details_of.items())
    return details_of, Summary(rows, not_run)


def print_table(summary: Summary) -> None:
    """Print a table of the targets that can run here, at most 100 columns wide, and below it why targets do not pass.

    Columns that do not fit are in the report only; values are never truncated. In colour on a terminal, unless NO_COLOR
    is set.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=_CONSOLE_WIDTH, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = [row for row in summary.targets if not why_not_here(summary, row)]
    columns = _fitting([(column, list(map(column.of, rows))) for column in COLUMNS])
    for column, _ in columns:
        heading = "\n".join(column.heading.rsplit(" ", 1))
        table.add_column(heading, justify=column.side, no_wrap=True, vertical="bottom")
    row_styles = {**_STYLES, PASS: None}  # colour draws the eye to rows that do not pass
    for number, row in enumerate(rows):
        table.add_row(*(cells[number] for _, cells in columns), style=row_styles[row.verdict])
    if rows:
        console.print(table)
    # Without markup: rich would read words in brackets as styles.
    for result, targets, reason in reasons(summary.targets):
        console.print(f"{targets}: {reason}", style=_STYLES[result], markup=False, highlight=False)


def _fitting(columns: Sequence[tuple[Column, list[str]]]) -> list[tuple[Column, list[str]]]:
    """Return the columns with a value, without those of the highest ranks that do not fit in the table's width."""
    fitting = [(column, cells) for column, cells in columns if set(cells) != {"-"}]
    # Two spaces are between columns, but not after the last.
    while sum(2 + _width(column, cells) for column, cells in fitting) > _TABLE_WIDTH + 2:
        least_important = max(fitting, key=lambda entry: entry[0].rank)
        if not least_important[0].rank:
            break
        fitting.remove(least_important)
    return fitting


def _width(column: Column, cells: Sequence[str]) -> int:
    # A heading of several words takes two lines.
    return max(map(len, [*column.heading.rsplit(" ", 1), *cells]))


def print_verdict(summary: Summary) -> None:
    from rich.console import Console

    style = f"bold {_STYLES[overall(summary)]}"
    Console(soft_wrap=True).print(headline(summary), style=style, markup=False, highlight=False)


def _row(target: Target, details: Details) -> SummaryRow:
    engines = details.engines
    speed = details.speed
    error = details.quantization_error
    device = getattr(engines, "device", {})
    reasons = [_reason(name, check) for name, check in details.checks.items() if check.result != PASS]
    return SummaryRow(
        model=target.model,
        layers=target.layers,
        precision=target.precision,
        backend=target.backend,
        verdict=verdict(check.result for check in details.checks.values()),
        backend_version=getattr(engines, "backend_version", None),
        device=device.get("name") or device.get("architecture"),
        engine_digest=details.digest,
        reproduced=getattr(details.reproduction, "in_words", "-"),
        reason="; ".join(reasons) or None,
        prefill_tokens_per_s=getattr(speed, "prefill_tokens_per_s", None),
        decode_tokens_per_s=getattr(speed, "decode_tokens_per_s", None),
        quantization_error=error.words() if error else None,
        quantization_logit_error=getattr(error, "rms_logit_error", None),
        quantization_tokens_differing=getattr(error, "tokens_differing", None),
        quantization_perplexity=getattr(error, "perplexity_change", None),
        **_check_values(details),
    )


def _check_values(details: Details) -> dict[str, Any]:
    """Return the values of a row that come from checks: their results, and the figures of the current engines."""
    values: dict[str, Any] = dict.fromkeys(column.key for column in (*RESULTS, *FIGURES))
    for check in CHECKS:
        checked = details.checks.get(check.name)
        if checked is None:
            continue
        if check.result:
            values[check.result.key] = checked.result
        # A comparison may be of engines before the last build; its error does not describe these.
        if checked.report and check.figures and checked.report.engine_digest == details.digest:
            values |= {column.key: figure(checked.report) for column, figure in check.figures.items()}
    return values


def _reason(name: str, check: Checked) -> str:
    if check.result == NOT_RUN:
        name = f"{name} {NOT_RUN}"
    return f"{name}: {check.reason}"


def _csv(rows: Sequence[SummaryRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[field.name for field in fields(SummaryRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
