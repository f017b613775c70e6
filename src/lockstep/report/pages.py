"""The report's pages: index.html and a page of each target, from the templates of this folder.

The summary's rows and the details of each target in; pages out. JSON is linked, not shown.
"""

from __future__ import annotations

import functools
import json
import math
import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.certificate import LOOK_INTERVAL, Certificate
from lockstep.artifacts.engines import EngineFile
from lockstep.artifacts.statement import statement_path
from lockstep.artifacts.summary import Summary, SummaryRow
from lockstep.manifests.manifest_files import failed_path
from lockstep.report.about import about
from lockstep.report.charts import Point, curves
from lockstep.report.checks import CHECKS, COLUMNS, Column, number
from lockstep.report.details import Details
from lockstep.report.jobs import JobState
from lockstep.report.pictures import model_charts, target_charts, worst_of_layers
from lockstep.report.prompts import answers, differences
from lockstep.report.since_lock import Changes, meanings
from lockstep.report.verdict import NOT_RUN, advice, headline, overall, reasons, verdict
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from jinja2 import Environment

_CURVES = 7  # the likeliest hypothesis, which is not drawn, and six: colours are eight
# HTML forbids control characters, which prompts and answers may hold: Unicode's pictures of them are shown.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


def index(
    results: Results,
    summary: Summary,
    changes: Mapping[str, Changes],
    details_of: Mapping[Target, Details],
    jobs: Sequence[JobState],
) -> bytes:
    rows = summary.targets
    models = list(dict.fromkeys(row.model for row in rows))
    charts = {}
    for model in models:
        of_model = {target: details for target, details in details_of.items() if target.model == model}
        charts[model] = model_charts(of_model, [entry for entry in jobs if entry.job.names.get("model") == model])
    files = (results.summary(), results.summary().with_suffix(".csv"), results.config())
    return _render(
        "index.html",
        results.report_page(),
        title=f"{', '.join(models)}: {headline(summary)}",
        overall=overall(summary),
        headline=headline(summary),
        reasons=reasons(rows),
        advice=advice(summary),
        about=about(results, models),
        models={model: _groups(rows, model) for model in models},
        charts=charts,
        changes=changes,
        page_of=results.target_page,
        files=[(path.name, path) for path in files],
    )


def target(results: Results, name: Target, row: SummaryRow, details: Details, jobs: Sequence[JobState]) -> bytes:
    """Return the page of one target. row: its row of the summary."""
    # Checks that many targets share come first: their paths have fewer wildcards.
    checks = sorted(CHECKS, key=lambda check: len(check.stage.wildcards))
    validation = details.checks["validate"].report
    engines = details.engines  # None where they are not built
    options = getattr(engines, "options", {})
    folder = results.engines(name.model, name.precision, name.backend).parent

    def size_of(engine: EngineFile) -> str:
        path = folder / engine.file
        if not path.is_file():
            return "-"
        return _bytes_text(path.stat().st_size)

    return _render(
        "target.html",
        results.target_page(name),
        title=f"{name}: {row.verdict}",
        row=row,
        details=details,
        first_page=results.report_page(),
        checks=[(check, details.checks[check.name]) for check in checks if check.name in details.checks],
        charts=target_charts(name, details, jobs),
        worst=worst_of_layers(getattr(validation, "blocks", None) or ()),
        reproduced=_reproduced(details),
        device=" ".join(_device_words(getattr(engines, "device", {}))),
        options=", ".join(f"{key}: {_option(value)}" for key, value in sorted(options.items())),
        size_of=size_of,
        files=[(title, path) for title, path in _files(results, name) if path.is_file()],
    )


def certificate(page: Path, document: Certificate) -> bytes:
    """Return the page of a certificate, to be written to `page`."""
    series = {}
    for name in sorted(document.trace, key=lambda name: -document.trace[name][-1])[:_CURVES]:
        # They are relative to the likeliest, so at most 0; the chart's scale is logarithmic.
        series[name] = [Point(LOOK_INTERVAL * look, -value) for look, value in enumerate(document.trace[name], start=1)]
    chart = curves("Nats below the likeliest", "answers", series, legend_at_bottom_columns=1, height=320)
    title = f"{document.model}: {document.verdict}"
    return _render("certificate.html", page, title=title, certificate=document, charts=[chart], files=[])


def _render(template: str, page: Path, **values: Any) -> bytes:
    def href(path: Path) -> str:
        return urllib.parse.quote(Path(os.path.relpath(path, page.parent)).as_posix())

    text = _environment().get_template(template).render(href=href, **values)
    return f"{text}\n".encode()


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lockstep.report"),
        # Prompts may contain HTML. Charts are `Markup`, which is not escaped, here or in `finalize`.
        autoescape=True,
        finalize=lambda value: value.translate(_PICTURES) if type(value) is str else value,
        # Otherwise a missing value would be an empty cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.globals |= {
        "answers": answers,
        "depths": lambda rows: [(_layers(row), [row]) for row in rows],
        "differences": differences,
        "layers": _layers,
        "meanings": meanings,
        "verdict_of": lambda rows: verdict(row.verdict for row in rows),
    }
    return environment


def _groups(rows: Sequence[SummaryRow], model: str) -> tuple[list[tuple[str, list[SummaryRow]]], list[Column]]:
    """Return a model's rows by precision and backend, most layers first, and the columns that have values."""
    groups: dict[str, list[SummaryRow]] = {}
    for row in rows:
        if row.model == model:
            groups.setdefault(f"{row.precision} on {row.backend}", []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: -math.inf if row.layers == "all" else -int(row.layers))
    checked_first = sorted(groups.items(), key=lambda item: item[1][0].verdict == NOT_RUN)
    # The row with the most layers heads its group.
    deepest = [group[0] for group in groups.values()]
    # The first two columns, target and verdict, are in every table.
    columns = [column for column in COLUMNS[2:] if set(map(column.of, deepest)) != {"-"}]
    return checked_first, columns


def _layers(row: SummaryRow) -> str:
    if row.layers == "all":
        return "all layers"
    return f"first {row.layers} layer{'s' * (row.layers != 1)}"


def _device_words(device: Mapping[str, Any]) -> Iterable[str]:
    keys = ("name" if "name" in device else "type", "vendor", "architecture", "compute_capability")
    return (str(device[key]) for key in keys if isinstance(device.get(key), (str, int, float)))


def _bytes_text(nbytes: float) -> str:
    """Return a number of bytes in powers of 1000: `8.2 MB`."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 1000:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:.1f} TB"


def _option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reproduced(details: Details) -> str:
    if not details.reproduction:
        return "not tried: lockstep reproduce builds it again"
    differing = list(filter(None, details.reproduction.artefacts.values()))
    return "; ".join([f"the same in {details.reproduction.in_words} builds", *differing[:1]])


def _files(results: Results, name: Target) -> list[tuple[str, Path]]:
    """Return the documents that a page shows, by title; those of failures too."""
    engines = results.engines(name.model, name.precision, name.backend)
    names = (name.model, name.precision, name.layers, name.backend)
    reports = []
    # Reports of this target alone come first, those that it shares last.
    for check in sorted(CHECKS, key=lambda check: -len(check.stage.wildcards)):
        path = check.path(results, name)
        reports.append((check.title, path))
        reports.append((f"{check.title}, failed", failed_path(path)))
    return [
        *reports,
        ("speed", results.speed(*names)),
        ("engines", engines),
        ("statement of the engines", statement_path(engines)),
        ("reproduction", results.reproduction(*names)),
        ("reference", results.reference_of(*names[:3])),
        ("quantization error", results.quantization_error(*names[:3])),
    ]
