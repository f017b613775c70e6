"""All that is known of a target: its manifests in; the results of its checks, and what the report shows of it, out.

A check has passed where its report is there, has its record, and is of what lies there now; it has failed where the
report of a failure is there, which the next pass removes. Else it is "not run".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import read_json
from lockstep.artifacts.manifest_files import content, failed_path, record_path
from lockstep.errors import InputError
from lockstep.report.verdict import FAIL, NOT_RUN, PASS
from lockstep.targets import Results, Target


@dataclass(frozen=True)
class Checked:
    """What is known of a check: PASS with its report, or FAIL or NOT_RUN with the reason."""

    result: str
    reason: str | None = None
    report: Mapping[str, Any] = field(default_factory=dict)


def _checked(out: Path, format: str, inputs: Mapping[str, Path]) -> Checked:
    """inputs: what the check reads, by the names of its record."""
    failed = failed_path(out)
    try:
        if failed.is_file():
            report = read_json(failed)
            return Checked(
                FAIL, str(report.get("failure") or f"see {failed}"), report if report["format"] == format else {}
            )
        if not out.is_file():
            return Checked(NOT_RUN, f"{out} is not there")
        if not record_path(out).is_file():
            return Checked(NOT_RUN, f"no record says how {out} was made")
        report, of = read_json(out, format), read_json(record_path(out), formats.BUILD)["inputs"]
        for name, path in inputs.items():
            if name in of and (not path.is_file() or content(path) != of[name]):
                return Checked(NOT_RUN, f"{path} is another since")
        return Checked(report["result"], None, report)
    except (InputError, LookupError, TypeError, AttributeError) as error:
        return Checked(
            NOT_RUN,
            " ".join(str(error).split())
            if isinstance(error, InputError)
            else f"{out}: expected a report with its record, found other entries",
        )


@dataclass(frozen=True)
class Details:
    """All that is known of a target. checks: validate, golden, and compare where it ran; engines: their manifest, None
    where it is not there; speed, reproduction: empty where they are not there or of other engines."""

    checks: Mapping[str, Checked]
    engines: EngineSetManifest | None
    speed: Mapping[str, Any]
    reproduction: Mapping[str, Any]


def details(results: Results, target: Target, cannot_run: str | None = None) -> Details:
    """What lies there of a target now. cannot_run: why its engines do not run here, where they do not."""
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
    built = _engines(engines["engines"])
    if golden.result == NOT_RUN and cannot_run and not results.golden(*names).is_file():
        golden = Checked(NOT_RUN, cannot_run)
    checks = {"validate": validation, "golden": golden}
    if comparison.result != NOT_RUN:  # only some backends are compared, and not always
        checks["compare"] = comparison
    digest = golden.report.get("engine_digest") or (built and built.digest)
    reproduction = _entries(results.reproduction(*names))
    return Details(
        checks,
        built,
        _entries(results.speed(*names)) if golden.result == PASS else {},
        reproduction if digest and reproduction.get("engine_digest") == digest else {},
    )


def _engines(path: Path) -> EngineSetManifest | None:
    """An engine set's manifest; None where there is none that can be read, which the checks that read it say."""
    try:
        return EngineSetManifest.load(path)
    except InputError:
        return None


def _entries(path: Path) -> Mapping[str, Any]:
    """A manifest; nothing where there is none that can be read, which the checks that read it say."""
    try:
        value = read_json(path)
    except InputError:
        return {}
    return value if isinstance(value, dict) else {}
