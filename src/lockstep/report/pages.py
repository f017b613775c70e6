"""The report's pages: index.html and a page of each target.

The summary's rows and what is known of each target in; pages out. The index opens with the verdict on all targets. JSON
is linked, not shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.reports import GoldenReport, ValidationReport
from lockstep.artifacts.summary import SummaryRow
from lockstep.manifests.manifest_files import failed_path
from lockstep.report import charts
from lockstep.report.checks import CHECKS
from lockstep.report.details import Details
from lockstep.report.markup import items, link, page, pairs, result, table, tag, text
from lockstep.report.prompts import prompt
from lockstep.report.since_lock import Change
from lockstep.report.verdict import sentence, verdict
from lockstep.targets import Results, Target

_SHORT = "All golden prompts in one batch; they are short: for comparing targets, not machines."


def index(results: Results, rows: Sequence[SummaryRow], since_lock: Mapping[str, Sequence[Change]]) -> bytes:
    """Return the first page.

    It has the verdict, all targets, their speeds, and what changed since the locks.
    """
    here, verdicts = results.report_page(), [row.verdict for row in rows]
    said = result(verdict(verdicts), sentence(verdicts))
    parts = [tag("h1", said), _targets(results, rows)]
    whole, cut = [row for row in rows if row.layers == "all"], [row for row in rows if row.layers != "all"]
    parts += _speeds("Speed of the whole model", whole, _SHORT)
    parts += _speeds(
        "Speed by depth",
        sorted(cut, key=lambda row: (row.model, row.precision, row.backend, row.layers)),
        f"Of the model cut after its first layers, as some targets are checked. {_SHORT}",
    )
    for model in dict.fromkeys(row.model for row in rows):
        parts += _since_lock(model, since_lock.get(model))
    files = (results.summary(), results.summary().with_suffix(".csv"), results.config())
    parts += ["<h2>Files</h2>", items([link(path, here, path.name) for path in files])]
    return page(f"Lockstep: {sentence(verdicts)}", parts)


def target(
    results: Results,
    name: Target,
    rows: Sequence[SummaryRow],
    row: SummaryRow,
    known: Details,
    since_lock: Sequence[Change] | None,
) -> bytes:
    """Return the page of one target.

    rows: those of all targets; row: its own; since_lock: of its model.
    """
    here = results.target_page(name)
    parts = [
        tag("p", link(results.report_page(), here, "All targets")),
        f"<h1>{text(name)}: {result(row.verdict)}</h1>",
        _shown(lambda: _checks(known)),
        "<h2>Prompts</h2>",
        _shown(lambda: _prompts(known)),
        *(["<h2>Adapters</h2>", _shown(lambda: _adapted(known))] if "adapted" in known.checks else []),
        "<h2>Error by layer</h2>",
        _shown(lambda: _errors(name, known)),
        "<h2>Speed</h2>",
        _shown(lambda: _speed(rows, row, known)),
        "<h2>Engines</h2>",
        _shown(lambda: _engines(results, name, row, known)),
        *_since_lock(name.model, since_lock and [change for change in since_lock if change.is_of(name)]),
        "<h2>Files</h2>",
        items([link(path, here, title) for title, path in _files(results, name) if path.is_file()]),
    ]
    return page(f"{name}: {row.verdict}", parts)


def _shown(make: Callable[[], str]) -> str:
    """Return a part of a page, whatever stands in the reports that it is made of."""
    try:
        return make()
    except (LookupError, TypeError, AttributeError, ValueError):
        return tag("p", "Its report has other entries than this version writes; the files are linked below.", "wait")


def _targets(results: Results, rows: Sequence[SummaryRow]) -> str:
    here = results.report_page()
    figures = [column for check in CHECKS for column in check.figures if column.heading]
    headings = ["target", "result", "engines", "reproduced", *(column.heading for column in figures), "drift", "why"]
    cells = [
        [
            link(results.target_page(row.target), here, str(row.target)),
            result(row.verdict),
            tag("code", text(str(row.engine_digest or "-")[:12])),
            text(row.reproduced),
            *(_number(getattr(row, column.key), column.form) for column in figures),
            text(row.drift or ""),
            text(row.reason or ""),
        ]
        for row in rows
    ]
    shown = [True] * (len(headings) - 2) + [any(row.drift for row in rows), any(row.reason for row in rows)]
    headings, cells = list(compress(headings, shown)), [list(compress(cell, shown)) for cell in cells]
    return table(headings, cells, numbers=range(4, 4 + len(figures)))


def _speeds(title: str, rows: Sequence[SummaryRow], caption: str) -> list[str]:
    """Return a chart of the targets whose speed is known; nothing without any."""
    shown = [row for row in rows if row.prefill_tokens_per_s is not None]
    return (
        [tag("h2", text(title)), tag("p", text(caption), "quiet"), _shown(lambda: charts.speeds(shown))]
        if shown
        else []
    )


def _since_lock(model: str, changes: Sequence[Change] | None) -> list[str]:
    if changes is None:
        return []
    title = tag("h2", f"What changed since the lock of {text(model)}")
    return [title, items([tag("code", text(change.line)) for change in changes]) if changes else "<p>Nothing.</p>"]


def _checks(known: Details) -> str:
    checks = sorted(CHECKS, key=lambda check: len(check.stage.wildcards))  # first what many targets share
    cells = [
        [text(check.name), text(check.compares), result(checked.result), text(checked.reason or "")]
        for check in checks
        if (checked := known.checks.get(check.name))
    ]
    drift = [tag("p", f"Drift of the quantised weights: {text(known.drift.words())}.")] if known.drift else []
    return "".join([table(("check", "what is compared", "result", "why"), cells), *drift])


def _prompts(known: Details) -> str:
    golden = known.report(GoldenReport)
    if not golden or not golden.prompts:
        return _nothing(known.checks["golden"].reason)
    entries, long = golden.prompts, golden.long_prompt
    equal = sum(entry.tokens_equal for entry in entries)
    lines = [f"{equal} of {len(entries)} prompts give the reference's tokens."]
    if long:
        lines.append(
            f"The long prompt, of {long.num_tokens} tokens: largest logit error "
            f"{_number(long.max_logit_error, '.1e')} in one piece, {_number(long.cut_max_logit_error, '.1e')} "
            f"in pieces, {_number(long.single_max_logit_error, '.1e')} token by token; the precision itself costs "
            f"{long.logit_noise:.1e}, {long.tolerance:.1e} passes."
        )
    head = [tag("p", text(line), "quiet") for line in lines]
    return "\n".join([*head, *(prompt(entry) for entry in entries)])


def _adapted(known: Details) -> str:
    """Return the answers with each adapter, and without one."""
    report = known.report(AdaptedReport)
    if not report:
        return _nothing(known.checks["adapted"].reason)
    head = (
        f"{len(report.adapters)} adapters, {report.places} of them resident at a time, beside requests without one, in "
        f"one batch."
    )
    cells = [
        [
            text(entry.adapter or "none"),
            text(entry.text),
            text(entry.text_out),
            text(entry.reference_text),
            _number(entry.max_logit_error, ".1e"),
            _number(entry.from_base, ".1f"),
        ]
        for entry in sorted(report.prompts, key=lambda entry: (entry.text, entry.adapter))
    ]
    headings = ("adapter", "prompt", "decoded", "reference", "logit error", "moves logits by")
    return f"{tag('p', text(head), 'quiet')}\n{table(headings, cells, numbers=(4, 5))}"


def _nothing(reason: str | None) -> str:
    return tag("p", text(f"Nothing to show: {reason}." if reason else "Nothing to show."))


def _errors(name: Target, known: Details) -> str:
    validation = known.report(ValidationReport)
    if not validation or not validation.blocks:
        return _nothing(known.checks["validate"].reason)
    line = charts.error_line(f"{name.precision}, {name.layers} layers", validation.blocks)
    caption = "Of what each layer of the graphs computes, against PyTorch, relative to the size of each row."
    return f"{tag('p', text(caption), 'quiet')}\n{charts.error_by_layer([line])}"


def _speed(rows: Sequence[SummaryRow], row: SummaryRow, known: Details) -> str:
    speed = known.speed
    if not speed:
        return "<p>Not measured: it is measured by a golden check that passes.</p>"
    what = "whole model" if row.layers == "all" else f"first {row.layers} layers only"
    batch = (f"{speed.batch_size} prompts in a batch", speed.prefill_tokens_per_s, speed.decode_tokens_per_s)
    alone = ("one prompt alone", speed.alone_prefill_tokens_per_s, speed.alone_decode_tokens_per_s)
    parts = [_tokens_per_s(what, [batch, alone])]
    cut = [other for other in rows if other.layers != "all"]
    depths = [other for other in cut if replace(other.target, layers="all") == row.target]
    if row.layers == "all" and depths:
        rates = [
            (f"first {other.layers}", other.prefill_tokens_per_s, other.decode_tokens_per_s)
            for other in sorted(depths, key=lambda other: other.layers)
        ]
        parts += ["<h3>By depth: cut models, in a batch</h3>", _tokens_per_s("layers", rates)]
    return "\n".join(parts)


def _tokens_per_s(first: str, rates: Sequence[tuple[str, float | None, float | None]]) -> str:
    cells = [[text(name), _number(prefill, ".0f"), _number(decode, ".0f")] for name, prefill, decode in rates]
    return table((first, "prefill, tokens/s", "decode, tokens/s"), cells, numbers=(1, 2))


def _engines(results: Results, name: Target, row: SummaryRow, known: Details) -> str:
    if not known.engines:
        return "<p>Not built.</p>"
    folder = results.engines(name.model, name.precision, name.backend).parent
    entries = sorted(known.engines.engines.items())
    cells = [
        [text(engine), _size(folder / entry.file), tag("code", text(entry.sha256[:12]))] for engine, entry in entries
    ]
    device = known.engines.device
    facts = (
        ("engine set", tag("code", text(row.engine_digest or "-"))),
        ("reproduced", text(_reproduced(known))),
        ("built by", text(f"{known.engines.backend} {known.engines.backend_version}")),
        ("for", text(" ".join(_words(device)))),
        ("options", text(_options(known.engines.options))),
    )
    return f"{pairs(facts)}\n{table(('engine', 'size', 'sha256'), cells, numbers=(1,))}"


def _words(device: Mapping[str, Any]) -> Iterable[str]:
    """Return the words that name a device.

    These are texts and numbers of its entry, not its instruction sets.
    """
    keys = ("name" if "name" in device else "type", "vendor", "architecture", "compute_capability")
    return (str(device[key]) for key in keys if isinstance(device.get(key), (str, int, float)))


def _options(options: Mapping[str, Any]) -> str:
    values = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in sorted(options.items())
    }
    return ", ".join(f"{name}: {value}" for name, value in values.items())


def _reproduced(known: Details) -> str:
    if not known.reproduction:
        return "not tried: lockstep reproduce builds it again"
    level, rounds = known.reproduction.level, known.reproduction.rounds
    found = known.reproduction.levels.get(level)
    what = found.what if found else ""
    return f"{level}{': ' * bool(what)}{what} (built again {'once' if rounds == 1 else f'{rounds} times'})"


def _files(results: Results, name: Target) -> list[tuple[str, Path]]:
    """Return the documents behind a page, by title; those of failures too."""
    model, precision, layers, backend = name.model, name.precision, name.layers, name.backend
    engines = results.engines(model, precision, backend)
    checks = sorted(CHECKS, key=lambda check: -len(check.stage.wildcards))  # first what is of this target alone
    reports = [(check.title, check.path(results, name)) for check in checks]
    return [
        *(found for title, path in reports for found in ((title, path), (f"{title}, failed", failed_path(path)))),
        ("speed", results.speed(model, precision, layers, backend)),
        ("engines", engines),
        ("provenance of the engines", engines.with_name("provenance.json")),
        ("reproduction", results.reproduction(model, precision, layers, backend)),
        ("reference", results.reference_of(model, precision, layers)),
        ("drift", results.drift(model, precision, layers)),
    ]


def _size(path: Path) -> str:
    """Return the size of a file as `8.2 MB`, in powers of 1000; "-" for none."""
    if not path.is_file():
        return "-"
    size = float(path.stat().st_size)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _number(value: Any, form: str) -> str:
    if isinstance(value, (int, float)):
        return f"{value:{form}}"
    return "-" if value is None else text(value)
