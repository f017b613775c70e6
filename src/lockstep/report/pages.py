"""The report's pages: index.html and a page of each target.

The summary's rows and what is known of each target in; pages out. The index opens with the verdict on all targets. JSON
is linked, not shown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.reports import PASS, GoldenReport, ValidationReport
from lockstep.artifacts.summary import Summary, SummaryRow
from lockstep.manifests.manifest_files import failed_path
from lockstep.provenance.cache.upkeep import bytes_text
from lockstep.report import charts
from lockstep.report.about import about
from lockstep.report.checks import CHECKS, COLUMNS, Column
from lockstep.report.details import Details
from lockstep.report.markup import items, link, page, pairs, result, table, tag, text
from lockstep.report.prompts import prompt
from lockstep.report.since_lock import Change, meanings
from lockstep.report.verdict import NOT_RUN, headline, overall, reasons, verdict
from lockstep.targets import Results, Target

_ERRORS = (
    "Logit error: the largest difference from transformers. Rounding error: what the precision costs transformers "
    "itself. Quantization error: the rms of what smaller weights change."
)
_SHORT = "All golden prompts in one batch; they are short: for comparing targets, not machines."


def index(results: Results, summary: Summary, since_lock: Mapping[str, Sequence[Change]]) -> bytes:
    """Return the first page. It has the verdict, all targets, what changed since the locks, and speeds."""
    here, rows = results.report_page(), summary.targets
    models = list(dict.fromkeys(row.model for row in rows))
    why = [f"{tag('b', text(names))}: {text(reason)}" for _, names, reason in reasons(rows)]
    parts = [
        tag("p", "Lockstep report", "quiet"),
        tag("h1", text(", ".join(models))),
        tag("p", result(overall(summary), headline(summary)), "headline"),
        *([items(why)] if why else []),
        _about(results, models),
    ]
    for model in models:
        own = [row for row in rows if row.model == model]
        parts += [tag("h2", f"Targets of {text(model)}"), _targets(results, own), tag("p", _ERRORS, "quiet")]
        parts += _since_lock(model, since_lock.get(model))
    speeds = [row for row in _whole(rows) if row.prefill_tokens_per_s is not None]
    if speeds:
        parts += ["<h2>Speed</h2>", tag("p", _SHORT, "quiet"), charts.speeds(speeds)]
    files = (results.summary(), results.summary().with_suffix(".csv"), results.config())
    parts += ["<h2>Files</h2>", items([link(path, here, path.name) for path in files])]
    return page(f"{', '.join(models)}: {headline(summary)}", parts)


def target(
    results: Results, name: Target, row: SummaryRow, known: Details, since_lock: Sequence[Change] | None
) -> bytes:
    """Return the page of one target. row: its own of the summary; since_lock: of its model."""
    here = results.target_page(name)
    parts = [
        tag("p", link(results.report_page(), here, "All targets")),
        f"<h1>{text(name).replace('/', '/<wbr>')}: {result(row.verdict)}</h1>",
        _checks(known),
        "<h2>Prompts</h2>",
        _prompts(known),
        *(["<h2>Adapters</h2>", _adapted(known)] if "adapted" in known.checks else []),
        "<h2>Error by layer</h2>",
        _errors(name, known),
        "<h2>Speed</h2>",
        _speed(row, known),
        "<h2>Engines</h2>",
        _engines(results, name, row, known),
        *_since_lock(name.model, since_lock and [change for change in since_lock if change.is_of(name)]),
        "<h2>Files</h2>",
        items([link(path, here, title) for title, path in _files(results, name) if path.is_file()]),
    ]
    return page(f"{name}: {row.verdict}", parts)


def _about(results: Results, models: Sequence[str]) -> str:
    written, machine, versions, packages = about(results, models)
    listed = tag("p", text(", ".join(packages)), "quiet")
    folded = tag("details", tag("summary", f"packages ({len(packages)})") + listed)
    rows = [("written", text(written)), ("machine", text(machine)), ("versions", text(versions) + folded)]
    return pairs(rows)


def _by_engines(rows: Sequence[SummaryRow]) -> list[list[SummaryRow]]:
    """Return rows by model, precision and backend, each with the deepest model first."""
    groups: dict[Target, list[SummaryRow]] = {}
    for row in rows:
        groups.setdefault(replace(row.target, layers="all"), []).append(row)
    depth = {row.target: math.inf if row.layers == "all" else int(row.layers) for row in rows}
    return [sorted(group, key=lambda row: -depth[row.target]) for group in groups.values()]


def _whole(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return of each precision and backend the deepest model's row."""
    return [group[0] for group in _by_engines(rows)]


def _targets(results: Results, rows: Sequence[SummaryRow]) -> str:
    """Return a row for a precision and backend, with the figures of the deepest model; all depths are below it."""
    groups = sorted(_by_engines(rows), key=lambda group: group[0].verdict == NOT_RUN)
    columns = [column for column in COLUMNS[2:] if any(getattr(row, column.key) is not None for row in _whole(rows))]
    whole = [(f"{group[0].precision} on {group[0].backend}", group) for group in groups]
    below = []
    for group in groups:
        depths = _table(results, "layers", [(_layers(row), [row]) for row in group], columns)
        summary = f"{len(group)} layer counts and engines" if len(group) > 1 else "engines"
        below.append(tag("details", tag("summary", summary) + _built(group[0]) + depths))
    return _table(results, "precision and backend", whole, columns, below)


def _table(
    results: Results,
    first: str,
    groups: Sequence[tuple[str, Sequence[SummaryRow]]],
    columns: Sequence[Column],
    below: Sequence[str] = (),
) -> str:
    """Return a table with a row for each group: its name, which links the first of its targets, and that one's figures.

    Its result is that of all of them.
    """
    cells = [
        [
            link(results.target_page(group[0].target), results.report_page(), name),
            result(verdict(row.verdict for row in group)),
            *(_number(getattr(group[0], column.key), column.form) for column in columns),
        ]
        for name, group in groups
    ]
    headings = [first, "result", *(column.heading for column in columns)]
    return table(headings, cells, numbers=range(2, len(headings)), below=below)


def _built(row: SummaryRow) -> str:
    parts = [
        f"engines {row.engine_digest[:12]}" if row.engine_digest else "no engines",
        f"{row.backend} {row.backend_version}" if row.backend_version else "",
        f"for {row.device}" if row.device else "",
        "not built again yet" if row.reproduced == "-" else f"built again: {row.reproduced}",
    ]
    return tag("p", text(", ".join(filter(None, parts))), "quiet")


def _layers(row: SummaryRow) -> str:
    return "all layers" if row.layers == "all" else f"first {row.layers} layer{'s' * (row.layers != 1)}"


def _since_lock(model: str, changes: Sequence[Change] | None) -> list[str]:
    if changes is None:
        return []
    title = tag("h2", f"What changed since the lock of {text(model)}")
    if not changes:
        return [title, tag("p", result(PASS, "Nothing: all that is here is as it was locked."))]
    folded = []
    for colour, what, meaning, lines in meanings(changes):
        listed = items([tag("code", text(line)) for line in lines])
        meaning = re.sub("`(.+?)`", r"<code>\1</code>", text(meaning))
        folded.append(tag("details", f"<summary>{result(colour, what)} {meaning}</summary>{listed}", "said"))
    return [title, *folded]


def _checks(known: Details) -> str:
    checks = sorted(CHECKS, key=lambda check: len(check.stage.wildcards))  # first what many targets share
    cells = [
        [text(check.name), text(check.compares), result(checked.result), text(checked.reason or "")]
        for check in checks
        if (checked := known.checks.get(check.name))
    ]
    drift = [tag("p", f"Quantization error: {text(known.drift.words())}.")] if known.drift else []
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
            f"in pieces, {_number(long.single_max_logit_error, '.1e')} token by token; rounding error "
            f"{long.logit_noise:.1e}, allowed {long.tolerance:.1e}."
        )
    head = [tag("p", text(line), "quiet") for line in lines]
    return "\n".join([*head, *(prompt(entry) for entry in entries)])


def _adapted(known: Details) -> str:
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
    drawn = charts.error_by_layer(f"{name.precision}, {name.layers} layers", validation.blocks)
    caption = "Of what each layer of the graphs computes, against PyTorch, relative to the size of each row."
    return f"{tag('p', text(caption), 'quiet')}\n{drawn}"


def _speed(row: SummaryRow, known: Details) -> str:
    speed = known.speed
    if not speed:
        return "<p>Not measured: it is measured by a golden check that passes.</p>"
    what = "whole model" if row.layers == "all" else f"{_layers(row)} only"
    batch = (f"{speed.batch_size} prompts in a batch", speed.prefill_tokens_per_s, speed.decode_tokens_per_s)
    alone = ("one prompt alone", speed.alone_prefill_tokens_per_s, speed.alone_decode_tokens_per_s)
    cells = [[name, _number(prefill, ".0f"), _number(decode, ".0f")] for name, prefill, decode in (batch, alone)]
    return table((what, "prefill, tokens/s", "decode, tokens/s"), cells, numbers=(1, 2))


def _engines(results: Results, name: Target, row: SummaryRow, known: Details) -> str:
    if not known.engines:
        return "<p>Not built.</p>"
    folder = results.engines(name.model, name.precision, name.backend).parent
    cells = []
    for engine, entry in sorted(known.engines.engines.items()):
        path = folder / entry.file
        size = bytes_text(path.stat().st_size) if path.is_file() else "-"
        cells.append([text(engine), size, tag("code", text(entry.sha256[:12]))])
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
    """Return the words that name a device. These are texts and numbers of its entry, not its instruction sets."""
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
    differences = list(filter(None, known.reproduction.artefacts.values()))
    first = f"; {differences[0]}" if differences else ""
    return f"the same in {known.reproduction.in_words} builds{first}"


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
        ("quantization error", results.drift(model, precision, layers)),
    ]


def _number(value: Any, form: str) -> str:
    if isinstance(value, (int, float)):
        return f"{value:{form}}"
    return "-" if value is None else text(value)
